"""F38, F39: every window is rolled up exactly once per state of its source, whoever runs and however often."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.fleet import service as fleet
from controlplane.telemetry import repository, retention, rollups
from controlplane.telemetry.intake import MINUTE_JOB, store
from controlplane.telemetry.repository import Claim
from controlplane.telemetry.rollups import HOUR_JOB, JOBS, StaleClaimError
from dataplane.protocol import GatewayCounters, GatewayWindow, Window
from tests.controlplane.telemetry.reports import MODEL, POOL, counters, engine_window, gateway_report, report, series

HOUR = 1_700_000_000 // 3600 * 3600
MINUTE, HOURLY = JOBS[MINUTE_JOB], JOBS[HOUR_JOB]
LATER = HOUR + 2 * 3600.0


async def send(session: AsyncSession, start: int, accepted: int, *, sequence: int = 1, gateway: str = "g0") -> None:
    windows = [
        GatewayWindow(start=start, series=[series(tenant, counters(accepted=accepted)) for tenant in ("a", "b")])
    ]
    await store(session, [gateway_report(windows, gateway=gateway, sequence=sequence)], start + 5.0)


async def accepted(session: AsyncSession, resolution: int, start: int, end: int) -> dict[str, int]:
    """Requests by tenant in rows of `resolution`."""
    found: dict[str, int] = {}
    for key, data in await repository.windows(session, resolution, start, end):
        if key.source == "gateway" and key.tenant:
            made = msgspec.msgpack.decode(data, type=GatewayCounters)
            found[key.tenant] = found.get(key.tenant, 0) + made.accepted
    return found


async def roll(
    engine: AsyncEngine, job: rollups.Job, *, now: float = LATER, holder: str = "w", most: int = 60
) -> list[Claim]:
    """One tick and the runs it starts, each in its own transaction."""
    async with transaction(engine) as session:
        claims = await rollups.claim_due(session, job, holder=holder, now=now, most=most)
    for claim in claims:
        async with transaction(engine) as session:
            await rollups.run_claim(session, claim)
    return claims


async def fences(engine: AsyncEngine, job: str) -> list[int]:
    async with transaction(engine) as session:
        rows = await session.scalars(text("SELECT fence FROM rollup_claims WHERE job = :job"), {"job": job})
        return list(rows)


async def test_rolled_rows_hold_exactly_what_their_source_rows_hold(
    committed_engine: AsyncEngine, rng: random.Random
) -> None:
    total = 0
    async with transaction(committed_engine) as session:
        for n in range(0, 3600, 10):
            number = rng.randint(0, 5)
            total += number
            await send(session, HOUR + n, number, gateway=f"g{n % 3}")
    assert len(await roll(committed_engine, MINUTE)) == 60
    async with transaction(committed_engine) as session:
        assert await accepted(session, 60, HOUR, HOUR + 3600) == {"a": total, "b": total}
    assert len(await roll(committed_engine, HOURLY)) == 1
    async with transaction(committed_engine) as session:
        assert await accepted(session, 3600, HOUR, HOUR + 3600) == {"a": total, "b": total}
        rows = await repository.windows(session, 3600, HOUR, HOUR + 3600)
        assert {(key.instance, key.replica, key.boot_epoch) for key, _ in rows} == {("", "", 0)}


async def test_pool_gauges_are_means_over_time_of_sums_over_replicas(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        await fleet.ensure_pool(session, POOL, MODEL)
        for replica, used in (("r1", 10.0), ("r2", 30.0)):
            windows = [engine_window(HOUR + n, ttft=[0.1], blocks_used=used + n) for n in range(0, 120, 10)]
            await store(session, [report(replica, windows=windows)], HOUR + 100.0)
    await roll(committed_engine, MINUTE)
    await roll(committed_engine, HOURLY)
    async with transaction(committed_engine) as session:
        for resolution, offset in ((60, 25.0), (3600, 55.0)):
            key, data = (await repository.windows(session, resolution, HOUR, HOUR + 60))[0]
            window = msgspec.msgpack.decode(data, type=Window)
            assert key.pool == POOL
            mean = window.gauge_sums["blocks_used"] / window.gauge_samples
            assert mean == pytest.approx(40.0 + 2 * offset)
            assert window.counters.service.ttft is not None
            assert window.counters.service.ttft.count == {60: 12, 3600: 24}[resolution]


async def test_f39_two_workers_and_two_beats_run_each_window_once(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        for n in range(20):
            await send(session, HOUR + 60 * n, 1)
    ticks = await asyncio.gather(*(roll(committed_engine, MINUTE, holder=f"w{n}") for n in range(6)))
    claimed = [claim.window_start for claims in ticks for claim in claims]
    assert sorted(claimed) == [HOUR + 60 * n for n in range(20)], "each window was handed out once"
    assert await fences(committed_engine, MINUTE_JOB) == [1] * 20
    assert await roll(committed_engine, MINUTE) == []


async def test_f38_a_redelivered_run_finds_nothing_to_do(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        await send(session, HOUR, 3)
    (claim,) = await roll(committed_engine, MINUTE)
    with pytest.raises(StaleClaimError):
        async with transaction(committed_engine) as session:
            await rollups.run_claim(session, claim)
    async with transaction(committed_engine) as session:
        assert await accepted(session, 60, HOUR, HOUR + 60) == {"a": 3, "b": 3}


async def test_f38_a_worker_that_lost_its_claim_leaves_nothing_behind(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        await send(session, HOUR, 3)
        (slow,) = await rollups.claim_due(session, MINUTE, holder="slow", now=LATER)
    assert await roll(committed_engine, MINUTE) == [], "a held claim is nobody else's"
    async with transaction(committed_engine) as session:
        await session.execute(text("UPDATE rollup_claims SET expires_at = now() - interval '1 second'"))
    async with transaction(committed_engine) as session:
        (fast,) = await rollups.claim_due(session, MINUTE, holder="fast", now=LATER)
    assert fast.fence > slow.fence
    with pytest.raises(StaleClaimError):
        async with transaction(committed_engine) as session:
            await rollups.run_claim(session, slow)
    async with transaction(committed_engine) as session:
        assert await number(session, 60) == 0
        await rollups.run_claim(session, fast)
    async with transaction(committed_engine) as session:
        sequences = await session.scalars(text("SELECT DISTINCT sequence FROM telemetry_windows WHERE resolution = 60"))
        assert list(sequences) == [fast.fence]


async def test_late_data_rolls_its_minute_and_its_hour_again(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        await send(session, HOUR, 3)
    await roll(committed_engine, MINUTE)
    await roll(committed_engine, HOURLY)
    async with transaction(committed_engine) as session:
        await send(session, HOUR, 5, sequence=2)
    await roll(committed_engine, MINUTE)
    await roll(committed_engine, HOURLY)
    async with transaction(committed_engine) as session:
        for resolution in (60, 3600):
            assert await accepted(session, resolution, HOUR, HOUR + 60) == {"a": 5, "b": 5}


async def test_data_that_comes_while_a_window_is_being_rolled_makes_it_due_again(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        await send(session, HOUR, 3)
        (claim,) = await rollups.claim_due(session, MINUTE, holder="w", now=LATER)
    async with transaction(committed_engine) as running:
        await rollups.run_claim(running, claim)  # has read 3, not yet committed
        late = asyncio.create_task(_send_late(committed_engine))
        await asyncio.wait({late}, timeout=0.2)
    await late
    assert len(await roll(committed_engine, MINUTE)) == 1
    async with transaction(committed_engine) as session:
        assert await accepted(session, 60, HOUR, HOUR + 60) == {"a": 7, "b": 7}


async def test_data_that_comes_after_the_claim_is_not_called_done_by_a_run_that_may_have_missed_it(
    committed_engine: AsyncEngine,
) -> None:
    async with transaction(committed_engine) as session:
        await send(session, HOUR, 3)
        (claim,) = await rollups.claim_due(session, MINUTE, holder="w", now=LATER)
    await _send_late(committed_engine)
    async with transaction(committed_engine) as session:
        await rollups.run_claim(session, claim)
    assert len(await roll(committed_engine, MINUTE)) == 1
    assert await roll(committed_engine, MINUTE) == []


async def _send_late(engine: AsyncEngine) -> None:
    async with transaction(engine) as session:
        await send(session, HOUR, 7, sequence=2)


async def test_an_open_window_waits_and_missed_ticks_are_caught_up_in_bounded_runs(
    committed_engine: AsyncEngine,
) -> None:
    async with transaction(committed_engine) as session:
        for n in range(10):
            await send(session, HOUR + 60 * n, 1)
    assert await roll(committed_engine, MINUTE, now=HOUR + 60.0) == [], "reports may still be under way"
    sizes = []
    while claims := await roll(committed_engine, MINUTE, now=HOUR + 601.0 + MINUTE.grace_s, most=4):
        sizes.append(len(claims))
    assert sizes == [4, 4, 2]


async def test_lag_is_the_age_of_the_oldest_window_still_due(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        assert await rollups.lags(session, LATER) == {MINUTE_JOB: 0.0, HOUR_JOB: 0.0}
        await send(session, HOUR, 1)
        lags = await rollups.lags(session, HOUR + 60.0 + MINUTE.grace_s + 33.0)
    assert lags[MINUTE_JOB] == 33.0
    await roll(committed_engine, MINUTE)
    async with transaction(committed_engine) as session:
        assert (await rollups.lags(session, LATER))[MINUTE_JOB] == 0.0


async def number(session: AsyncSession, resolution: int) -> int:
    query = text("SELECT count(*) FROM telemetry_windows WHERE resolution = :r")
    return int(await session.scalar(query, {"r": resolution}) or 0)


async def test_retention_deletes_what_is_past_its_time_in_batches(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        for n in range(6):
            await send(session, HOUR + 10 * n, 1)
        rows = await number(session, 10)
    day_later = HOUR + retention.DAY_S + 61.0
    async with transaction(committed_engine) as session:
        assert not await retention.delete_old(session, day_later)
        assert await number(session, 10) == rows, "rows that were not rolled up yet are kept, however old"
    await roll(committed_engine, MINUTE)
    async with transaction(committed_engine) as session:
        assert await retention.delete_old(session, day_later - 62.0, batch=7) is False
        assert await number(session, 10) == rows, "24 hours are not over"
        assert await retention.delete_old(session, day_later, batch=7)
        assert await number(session, 10) == rows - 7
        while await retention.delete_old(session, day_later, batch=7):
            pass
        assert (await number(session, 10), await number(session, 60)) == (0, 3)
    async with transaction(committed_engine) as session:
        await retention.delete_old(session, HOUR + retention.KEPT_S[60] + 61.0)
        assert await number(session, 60) == 3, "the hour was not rolled up yet"
    await roll(committed_engine, HOURLY)
    async with transaction(committed_engine) as session:
        await retention.delete_old(session, HOUR + retention.KEPT_S[60] + 61.0)
        assert (await number(session, 60), await number(session, 3600)) == (0, 3)
        await retention.delete_old(session, HOUR + retention.KEPT_S[3600] + 61.0)
        assert await number(session, 3600) == 0
        assert await session.scalar(text("SELECT count(*) FROM rollup_claims")) == 0


async def test_concurrent_retention_runs_do_not_wait_for_each_other(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        for n in range(12):
            await send(session, HOUR + 10 * n, 1)
    await roll(committed_engine, MINUTE)
    now = HOUR + retention.DAY_S + 3600.0
    async with transaction(committed_engine) as first, transaction(committed_engine) as second:
        await retention.delete_old(first, now, batch=5)
        async with asyncio.timeout(20):
            await retention.delete_old(second, now, batch=5)
