"""Reports as a replica or a gateway would send them, and usage records."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from dataplane.protocol import (
    Counters,
    GatewayCounters,
    GatewayReport,
    GatewaySeries,
    GatewayWindow,
    Gauges,
    Histogram,
    MemoryCounters,
    ReplicaState,
    Report,
    ServiceCounters,
    UsageBasis,
    UsageRecord,
    Window,
)

POOL = "smollm2"
MODEL = "smollm2-135m-instruct"
BOOT = 1_700_000_000_000

_attempts = itertools.count(1)


def histogram(values: Iterable[float]) -> Histogram:
    made = Histogram()
    for value in values:
        made.record(value)
    return made


def engine_window(
    start: int, *, ttft: Iterable[float] = (), queries: int = 0, hits: int = 0, **gauges: float
) -> Window:
    """A window with `gauges` as the means of two samples."""
    counters = Counters(
        service=ServiceCounters(ttft=histogram(ttft)),
        memory=MemoryCounters(prefix_queries=queries, prefix_hits=hits),
    )
    sums = {name: 2 * value for name, value in gauges.items()}
    return Window(start=start, counters=counters, gauge_sums=sums, gauge_max=dict(gauges), gauge_samples=2)


def report(
    replica: str = "r1",
    *,
    sequence: int = 1,
    boot_epoch: int = BOOT,
    pool: str = POOL,
    state: ReplicaState = ReplicaState.READY,
    **values: object,
) -> Report:
    defaults: dict[str, object] = {
        "model": MODEL,
        "url": "http://127.0.0.1:7310",
        "core_epoch": 1,
        "acknowledged": 0,
        "sent_at": 1_700_000_000.0,
        "started_at": 1_699_999_000.0,
        "gauges": Gauges(running=1, blocks_total=100, blocks_used=40, blocks_free=60, block_size=16, kv_slots_empty=64),
    }
    return Report(
        replica=replica,
        sequence=sequence,
        boot_epoch=boot_epoch,
        pool=pool,
        state=state,
        **{**defaults, **values},  # type: ignore[arg-type]
    )


def counters(
    *, accepted: int = 1, finish: str = "stop", ttft: Iterable[float] = (), tpot: Iterable[float] = (),
    prompt: int = 0, cached: int = 0, output: int = 0, **values: object,
) -> GatewayCounters:  # fmt: skip
    return GatewayCounters(
        accepted=accepted,
        finished={finish: accepted},
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        ttft=histogram(ttft),
        tpot=histogram(tpot),
        **values,  # type: ignore[arg-type]
    )


def series(tenant: str, made: GatewayCounters, *, pool: str = POOL, replica: str = "r1") -> GatewaySeries:
    return GatewaySeries(tenant=tenant, pool=pool, replica=replica, counters=made)


def gateway_report(
    windows: list[GatewayWindow],
    *,
    gateway: str = "gateway-0",
    sequence: int = 1,
    boot_epoch: int = BOOT,
    **values: object,
) -> GatewayReport:
    defaults: dict[str, object] = {"acknowledged": 0, "sent_at": 1_700_000_000.0, "started_at": 1_699_999_000.0}
    return GatewayReport(
        gateway=gateway,
        boot_epoch=boot_epoch,
        sequence=sequence,
        windows=windows,
        **{**defaults, **values},  # type: ignore[arg-type]
    )


def usage(attempt_id: str | None = None, **values: object) -> UsageRecord:
    defaults: dict[str, object] = {
        "request_id": "req",
        "tenant": "demo",
        "key_id": "key",
        "pool": POOL,
        "model": MODEL,
        "replica": "r1",
        "started_at": 1_700_000_000.0,
        "finished_at": 1_700_000_001.0,
        "finish": "stop",
        "basis": UsageBasis.ENGINE,
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "output_tokens": 5,
    }
    attempt = attempt_id if attempt_id is not None else f"attempt-{next(_attempts)}"
    return UsageRecord(attempt_id=attempt, **{**defaults, **values})  # type: ignore[arg-type]
