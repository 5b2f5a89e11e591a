"""How many requests a second one gateway process relays, and what each costs it.

Layer: service. wrk keeps 16 or 64 requests under way; the same load straight at the fake engine, in turns, says what
load and engine could do on their core: the gateway's figure is its own as long as that ceiling is far above it. The
plain relay, on the gateway's core in turns with it, says what a relay can do on this machine at all.
"""

from __future__ import annotations

import statistics

from controlplane.lab.bench import requests, wrk
from controlplane.lab.bench.case import TOKENS, Bench, ms, ratio, times, whole
from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.requests import Target
from controlplane.lab.bench.rounds import Rounds
from dataplane.bench.processes import cpu_seconds

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
        for each in (ours, plain):
            _measure(bench, each, connections)
    ceiling = statistics.median(ceilings)
    results[f"ceiling_requests_per_s_c{connections}"] = ceiling
    for prefix, each in (("", ours), ("plain_", plain)):
        results[f"{prefix}requests_per_s_c{connections}"] = each.median("rate")
        results[f"{prefix}cpu_ms_per_request_c{connections}"] = each.median("cpu_ms")
        results[f"{prefix}latency_ms_p99_c{connections}"] = each.median("p99_ms")
    ratios = [ratio(ours.median(figure), plain.median(figure)) for figure in ("rate", "cpu_ms")]
    results[f"plain_requests_ratio_c{connections}"], results[f"plain_cpu_ratio_c{connections}"] = ratios
    return [
        (*_row(ours, str(connections), ceiling), *(times(each) for each in ratios)),
        (*_row(plain, f"{connections}, plain relay", ceiling), "", ""),
    ]


def _measure(bench: Bench, rounds: Rounds, connections: int) -> None:
    """One more round. Raises LoadError."""
    before = cpu_seconds(rounds.pid)
    run = load(bench, rounds.target, connections)
    rounds.add(
        rate=run.requests_per_s,
        cpu_ms=(cpu_seconds(rounds.pid) - before) / run.requests * 1000,
        p50_ms=run.p50_us / 1000,
        p99_ms=run.p99_us / 1000,
    )


def _row(rounds: Rounds, name: str, ceiling: float) -> tuple[str, ...]:
    costs = (ms(rounds.median(figure)) for figure in ("cpu_ms", "p50_ms", "p99_ms"))
    return (name, whole(rounds.median("rate")), rounds.spread("rate"), whole(ceiling), *costs)


def load(bench: Bench, target: Target, connections: int) -> wrk.WrkRun:
    """One round. Raises LoadError when a request was refused or lost."""
    seconds = bench.case.size(6, 2)
    run = wrk.run(bench.wrk, target, requests.body(target, tokens=TOKENS), connections=connections, seconds=seconds)
    bench.deployment.check()
    if run.status or run.failures:
        raise LoadError(f"{target.name} refused {run.status} and lost {run.failures} of {run.requests} requests")
    return run
