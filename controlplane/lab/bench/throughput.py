"""How many requests a second one gateway process relays, and what each costs it.

Layer: service. wrk keeps 16 or 64 requests under way; the same load straight at the fake engine, in turns, says what
load and engine could do on their core: the gateway's figure is its own as long as that ceiling is far above it. The
plain relay, on the gateway's core in turns with it, says what a relay can do on this machine at all.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from controlplane.lab.bench import requests, wrk
from controlplane.lab.bench.case import TOKENS, Bench, ms, ratio, times, whole
from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.processes import cpu_seconds
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.requests import Target

CONNECTIONS = (16, 64)
COLUMNS = (
    "at a time",
    "requests/s",
    "rounds",
    "ceiling, direct",
    "CPU ms/request",
    "latency p50 ms",
    "latency p99 ms",
    "requests/s, ours/plain",
    "CPU, ours/plain",
)


@dataclass(slots=True)
class Rounds:
    """What each round at one target found."""

    target: Target
    pid: int
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)

    def measure(self, bench: Bench, connections: int) -> None:
        """One more round. Raises LoadError."""
        before = cpu_seconds(self.pid)
        run = load(bench, self.target, connections)
        self.cpu_ms.append((cpu_seconds(self.pid) - before) / run.requests * 1000)
        self.rates.append(run.requests_per_s)
        self.p50_ms.append(run.p50_us / 1000)
        self.p99_ms.append(run.p99_us / 1000)

    def note(self, results: dict[str, float | None], prefix: str, connections: int) -> None:
        results[f"{prefix}requests_per_s_c{connections}"] = statistics.median(self.rates)
        results[f"{prefix}cpu_ms_per_request_c{connections}"] = statistics.median(self.cpu_ms)
        results[f"{prefix}latency_ms_p99_c{connections}"] = statistics.median(self.p99_ms)

    def row(self, name: str, ceiling: float) -> tuple[str, ...]:
        spread = f"{whole(min(self.rates))} to {whole(max(self.rates))}"
        costs = (ms(statistics.median(each)) for each in (self.cpu_ms, self.p50_ms, self.p99_ms))
        return (name, whole(statistics.median(self.rates)), spread, whole(ceiling), *costs)


def throughput(bench: Bench) -> Section:
    """Results: `requests_per_s_c{16,64}` (median of the rounds), `ceiling_requests_per_s_c{16,64}`,
    `cpu_ms_per_request_c{16,64}` (user and system time of the gateway's processes), `latency_ms_p99_c{16,64}`; of the
    plain relay the same under `plain_…`, and ours over its: `plain_requests_ratio_c{16,64}` and
    `plain_cpu_ratio_c{16,64}`.
    """
    results: dict[str, float | None] = {}
    rows = []
    for connections in CONNECTIONS:
        bench.tell(f"throughput, {connections} requests at a time")
        rows += _at(bench, connections, results)
    note = (
        "Closed loop by wrk, median of the rounds. The ceiling is the same load straight at the fake engine; the plain "
        "relay has no logic and is the machine's measure."
    )
    return Section([Table("Requests, not streamed", COLUMNS, tuple(rows), note)], dict(results))


def _at(bench: Bench, connections: int, results: dict[str, float | None]) -> list[tuple[str, ...]]:
    deployment = bench.deployment
    ceilings: list[float] = []
    ours = Rounds(deployment.gateway, deployment.gateway_pid)
    plain = Rounds(deployment.plain, deployment.plain_pid)
    for _ in range(int(bench.case.size(3, 1))):
        ceilings.append(load(bench, deployment.direct, connections).requests_per_s)
        ours.measure(bench, connections)
        plain.measure(bench, connections)
    ceiling = statistics.median(ceilings)
    results[f"ceiling_requests_per_s_c{connections}"] = ceiling
    ours.note(results, "", connections)
    plain.note(results, "plain_", connections)
    requests_ratio = ratio(statistics.median(ours.rates), statistics.median(plain.rates))
    cpu_ratio = ratio(statistics.median(ours.cpu_ms), statistics.median(plain.cpu_ms))
    results[f"plain_requests_ratio_c{connections}"] = requests_ratio
    results[f"plain_cpu_ratio_c{connections}"] = cpu_ratio
    return [
        (*ours.row(str(connections), ceiling), times(requests_ratio), times(cpu_ratio)),
        (*plain.row(f"{connections}, plain relay", ceiling), "", ""),
    ]


def load(bench: Bench, target: Target, connections: int) -> wrk.WrkRun:
    """One round. Raises LoadError when a request was refused or lost."""
    seconds = bench.case.size(6, 2)
    run = wrk.run(bench.wrk, target, requests.body(target, tokens=TOKENS), connections=connections, seconds=seconds)
    bench.deployment.check()
    if run.status or run.failures:
        raise LoadError(f"{target.name} refused {run.status} and lost {run.failures} of {run.requests} requests")
    return run
