"""What it gains to serve requests first whose prefix is in the cache.

Layer: service. One knob: `SchedulerConfig.order`, cache-aware (Preble's local scheduler) against FCFS, on one engine.
Mooncake's blocks of 512 tokens are the engine's blocks. An order can only gain where many wait and the cache does not
hold what they share; a pool that holds everything, and a machine that keeps up, are the controls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from dataplane.bench.report import Table
from dataplane.bench.scheduling.case import MANY, SchedulerCase, Section, pool
from dataplane.bench.simulated import simulate
from dataplane.bench.traces import MOONCAKE_BLOCK, Trace, TraceMissingError, TraceRow, Traces
from dataplane.bench.workload import mean, percentile, requests_of_trace
from dataplane.hardware.hit_area import trace_saving
from dataplane.protocol import RequestOutput
from dataplane.scheduling.config import QueueOrder, SchedulerConfig
from dataplane.scheduling.plan import Plan
from dataplane.scheduling.scheduler import Scheduler

ORDERS = (QueueOrder.FCFS, QueueOrder.CACHE_AWARE)
BUDGET = 8192
SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Regime:
    """A pool of so many blocks, and how many times as fast the trace is played; at 0, nobody meets anybody."""

    name: str
    blocks: int
    speed: float


POOL = 2_000
"""Blocks of the pool: a million tokens, of which those that run take a fifth."""
APART_S = 1000.0
"""Between two arrivals where nobody is to meet anybody: Mooncake's come in clusters, however slowly played."""
PLAYED = {"mooncake": 0.1, "mooncake_synthetic": 0.2}
"""Three times what the machine keeps up with."""


def regimes(speed: float) -> tuple[Regime, ...]:
    """Where an order can gain, and the two controls, where it cannot."""
    return (
        Regime("crowded", POOL, speed),
        Regime("crowded, all fits", 30 * POOL, speed),
        Regime("no queue", POOL, 0.0),
    )


@dataclass(frozen=True, slots=True)
class CacheUse:
    """One order in one regime. `hits` is the share of prompt tokens found, and so of the linear work saved; of the
    attention `attention` is (the hit area of the whole trace). Times are in seconds."""

    hits: float
    attention: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    ttft_max: float
    prefill_tokens: int
    tokens_per_s: float


def run_cached(order: QueueOrder, trace: Trace, regime: Regime, case: SchedulerCase) -> CacheUse:
    config = SchedulerConfig(max_num_seqs=SEQUENCES, max_num_batched_tokens=BUDGET, max_waiting=MANY, order=order)
    kv = pool(regime.blocks * MOONCAKE_BLOCK, MOONCAKE_BLOCK, caching=True)
    rows: Iterable[TraceRow] = trace.rows
    if not regime.speed:
        rows = (replace(row, arrival=APART_S * number) for number, row in enumerate(rows))
    found: list[tuple[int, int]] = []

    def watch(_scheduler: Scheduler, _plan: Plan, outputs: list[RequestOutput], _now: float) -> None:
        found.extend(
            (output.cached_tokens, trace.rows[int(output.request_id)].prompt)
            for output in outputs
            if output.finish is not None
        )

    outcome = simulate(requests_of_trace(rows, regime.speed or 1.0), config, kv, cost=case.cost, watch=watch)
    return CacheUse(
        hits=outcome.hit_share,
        attention=trace_saving(found).attention,
        ttft_mean=mean(outcome.ttft),
        ttft_p50=percentile(outcome.ttft, 0.5),
        ttft_p99=percentile(outcome.ttft, 0.99),
        ttft_max=max(outcome.ttft),
        prefill_tokens=outcome.prefill_tokens,
        tokens_per_s=outcome.throughput,
    )


def cache(case: SchedulerCase, traces: Traces) -> Section:
    """Results: trace → regime → order → CacheUse. Raises TraceMissingError without either of Mooncake's traces."""
    section = Section()
    missing = None
    for role, speed in PLAYED.items():
        try:
            trace = traces.read(role, case.size(600, 200))
        except TraceMissingError as error:
            missing = error
            continue
        found = {
            regime.name: {order.value: run_cached(order, trace, regime, case) for order in ORDERS}
            for regime in regimes(speed)
        }
        section.tables.append(_table(trace, speed, found))
        section.results[trace.name] = {
            regime: {order: asdict(use) for order, use in by_order.items()} for regime, by_order in found.items()
        }
    if missing is not None and not section.tables:
        raise missing
    return section


def _table(trace: Trace, speed: float, found: dict[str, dict[str, CacheUse]]) -> Table:
    rows = tuple(
        (
            f"{regime}: {order}",
            f"{use.hits:.1%}",
            f"{use.attention:.1%}",
            f"{use.ttft_mean:,.0f} ({use.ttft_mean / by_order[QueueOrder.FCFS].ttft_mean:.2f}x)",
            f"{use.ttft_p50:,.0f}",
            f"{use.ttft_p99:,.0f}",
            f"{use.ttft_max:,.0f}",
            f"{use.prefill_tokens:,}",
            f"{use.tokens_per_s:.1f}",
        )
        for regime, by_order in found.items()
        for order, use in by_order.items()
    )
    return Table(
        f"Cache-aware order, {trace.name} (n = {len(trace.rows)}, played at {speed:g} of its speed), {POOL} "
        f"blocks of {MOONCAKE_BLOCK} tokens",
        (
            "regime: order",
            "token hits",
            "attention saved",
            "TTFT mean s",
            "p50",
            "p99",
            "max",
            "prefill tokens",
            "tokens/s",
        ),
        rows,
        "Controls: a pool that all fits in has the same hits in any order, and without a queue there is nothing to "
        "order. Groups by hit ratio favour short prompts too, which lowers the mean TTFT by itself. Prompts are "
        "longer than what the step's cost was fitted to: compare the orders, not the seconds.",
    )
