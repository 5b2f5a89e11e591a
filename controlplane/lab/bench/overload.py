"""How a gateway refuses when five times as much arrives as can be served.

Layer: service. The fake engine takes so long that the gateway's bound of requests in flight is the capacity; arrivals
are open-loop at five times that. What is refused must be refused at once, and what is served must not suffer.
"""

from __future__ import annotations

import random

from controlplane.lab.bench import openloop
from controlplane.lab.bench.case import Bench, ms, whole
from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.deployment import MAX_IN_FLIGHT
from controlplane.lab.bench.quantiles import spread
from controlplane.lab.bench.report import Section, Table

ENGINE_MS = 800
FACTOR = 5
CAPACITY = MAX_IN_FLIGHT * 1000 / ENGINE_MS
"""Requests a second that the bound lets through."""
BEGIN_S = 1.0
"""What is due in the first second finds free slots and is left out."""


def overload(bench: Bench) -> Section:
    """Results: `refusals_per_s`, `refusal_ms_p50`, `refusal_ms_p99` (from when the request was due), `served_per_s`,
    `served_added_ms_p50` (over the engine's own time), `overload_offered_per_s`.
    """
    bench.tell(f"{FACTOR}× overload")
    target = bench.deployment.gateway
    seconds = bench.case.size(12, 4)
    rng = random.Random(bench.case.seed)  # noqa: S311 - arrivals, not secrets
    due = openloop.arrivals(CAPACITY * FACTOR, seconds, rng)
    run = openloop.run(
        target.port, bench.request(target, pace={"first_ms": str(ENGINE_MS)}), due, connections=MAX_IN_FLIGHT + 64
    )
    bench.deployment.check()
    unexpected = sorted(set(run.by_status) - {200, 429, 503})
    if run.lost or unexpected or run.crowded:
        raise LoadError(
            f"overload: {run.lost} requests unanswered, statuses {unexpected}, {run.crowded} kept back by the load"
        )
    refused = run.times(503) + run.times(429)
    if not refused:
        raise LoadError(f"nothing was refused at {CAPACITY * FACTOR:.0f} requests/s")
    refusal, served = spread(refused), spread(run.times(200))
    results = {
        "overload_offered_per_s": len(due) / seconds,
        "refusals_per_s": refusal.n / seconds,
        "refusal_ms_p50": refusal.p50_ms,
        "refusal_ms_p99": refusal.p99_ms,
        "served_per_s": served.n / seconds,
        "served_added_ms_p50": served.p50_ms - ENGINE_MS,
    }
    row = (
        whole(results["overload_offered_per_s"]),
        whole(results["served_per_s"]),
        whole(results["refusals_per_s"]),
        ms(refusal.p50_ms),
        ms(refusal.p99_ms),
        ms(results["served_added_ms_p50"]),
    )
    columns = ("offered/s", "served/s", "refused/s", "refusal p50 ms", "p99 ms", "served, added p50 ms")
    note = (
        f"Poisson arrivals at {FACTOR}× the {CAPACITY:.0f} requests/s that {MAX_IN_FLIGHT} in flight at {ENGINE_MS} ms "
        "each allow; latencies from when each request was due."
    )
    return Section([Table(f"Refusals at {FACTOR}× overload", columns, (row,), note)], dict(results))
