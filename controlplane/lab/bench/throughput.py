"""How many requests a second one gateway process relays, and what each costs it.

Layer: service. wrk keeps 16 or 64 requests under way; the same load straight at the fake engine, in turns, says what
load and engine could do on their core: the gateway's figure is its own as long as that ceiling is far above it.
"""

from __future__ import annotations

import statistics

from controlplane.lab.bench import requests, wrk
from controlplane.lab.bench.case import TOKENS, Bench, ms, whole
from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.processes import cpu_seconds
from controlplane.lab.bench.report import Section, Table
from controlplane.lab.bench.requests import Target

CONNECTIONS = (16, 64)


def throughput(bench: Bench) -> Section:
    """Results: `requests_per_s_c{16,64}` (median of the rounds), `ceiling_requests_per_s_c{16,64}`,
    `cpu_ms_per_request_c{16,64}` (user and system time of the gateway's processes), `latency_ms_p99_c{16,64}`.
    """
    results: dict[str, float] = {}
    rows = []
    for connections in CONNECTIONS:
        bench.tell(f"throughput, {connections} requests at a time")
        ceiling, rates, cpu, p50, p99 = [], [], [], [], []
        for _ in range(int(bench.case.size(3, 1))):
            ceiling.append(load(bench, bench.deployment.direct, connections).requests_per_s)
            before = cpu_seconds(bench.deployment.gateway_pid)
            run = load(bench, bench.deployment.gateway, connections)
            cpu.append((cpu_seconds(bench.deployment.gateway_pid) - before) / run.requests * 1000)
            rates.append(run.requests_per_s)
            p50.append(run.p50_us / 1000)
            p99.append(run.p99_us / 1000)
        medians = [statistics.median(each) for each in (ceiling, rates, cpu, p50, p99)]
        results[f"ceiling_requests_per_s_c{connections}"] = medians[0]
        results[f"requests_per_s_c{connections}"] = medians[1]
        results[f"cpu_ms_per_request_c{connections}"] = medians[2]
        results[f"latency_ms_p99_c{connections}"] = medians[4]
        spread = f"{whole(min(rates))} to {whole(max(rates))}"
        rows.append(
            (str(connections), whole(medians[1]), spread, whole(medians[0]), *(ms(value) for value in medians[2:]))
        )
    columns = (
        "at a time",
        "requests/s",
        "rounds",
        "ceiling, direct",
        "CPU ms/request",
        "latency p50 ms",
        "latency p99 ms",
    )
    note = "Closed loop by wrk, median of the rounds. The ceiling is the same load straight at the fake engine."
    return Section([Table("Requests, not streamed", columns, tuple(rows), note)], dict(results))


def load(bench: Bench, target: Target, connections: int) -> wrk.WrkRun:
    """One round. Raises LoadError when a request was refused or lost."""
    seconds = bench.case.size(6, 2)
    run = wrk.run(bench.wrk, target, requests.body(target, tokens=TOKENS), connections=connections, seconds=seconds)
    bench.deployment.check()
    if run.status or run.failures:
        raise LoadError(f"{target.name} refused {run.status} and lost {run.failures} of {run.requests} requests")
    return run
