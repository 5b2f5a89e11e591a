"""Two reporters of one attempt: the replica's count goes before its gateway's, and neither is billed twice (F7, F8)."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.fleet.service import ensure_pool
from controlplane.ledger import service
from controlplane.ledger.held import HeldSettler
from controlplane.telemetry.completeness import completeness
from controlplane.telemetry.intake import store
from dataplane.protocol import UsageBasis, UsageRecord
from tests.controlplane.ledger.test_sums import price, set_prices
from tests.controlplane.telemetry.reports import MODEL, POOL, report, usage

BEGUN = time.time() - 60


async def tells(session: AsyncSession, *usages: UsageRecord, at: float, left: int = 0, replica: str = "r1") -> None:
    """A report of the replica at that moment, with all it has but `left`."""
    await ensure_pool(session, POOL, MODEL)
    sequence = 1 + int((at - BEGUN) * 10)
    told = [report(replica=replica, sequence=sequence, usage=list(usages), usage_left=left, sent_at=at)]
    assert not (await store(session, told, at)).refused_usage


def by_gateway(attempt: str, **values: object) -> UsageRecord:
    now = time.time()
    return usage(
        attempt,
        **{
            "basis": UsageBasis.COUNTED,
            "cached_tokens": 0,
            "output_tokens": 4,
            "started_at": now - 1,
            "finished_at": now,
            **values,
        },
    )


def by_engine(attempt: str, **values: object) -> UsageRecord:
    return by_gateway(
        attempt,
        **{"basis": UsageBasis.ENGINE, "cached_tokens": 16, "output_tokens": 7, "device_seconds": 0.25, **values},
    )


async def rows(session: AsyncSession) -> dict[str, tuple[str, int, float]]:
    found = await session.execute(text("SELECT attempt_id, basis, output_tokens, device_seconds FROM usage_ledger"))
    return {row[0]: (row[1], row[2], row[3]) for row in found}


async def held(session: AsyncSession) -> set[str]:
    return set(await session.scalars(text("SELECT attempt_id FROM usage_held")))


async def test_f7_the_engines_count_wins_whichever_comes_first(session: AsyncSession) -> None:
    now = time.time()
    await tells(session, at=now)
    taken = await service.record_from_gateways(session, [by_gateway("a"), by_gateway("b"), by_gateway("b")])
    assert (taken.stored, taken.held, taken.known) == ([], 2, 1)
    await tells(session, by_engine("a"), by_engine("c"), at=now + 1)
    taken = await service.record_from_gateways(session, [by_gateway("a"), by_gateway("c")])
    assert (taken.stored, taken.held, taken.known) == ([], 0, 2)
    assert await rows(session) == {"a": ("engine", 7, 0.25), "c": ("engine", 7, 0.25)}
    assert await held(session) == {"b"}


async def test_f7_what_the_replica_never_tells_is_billed_as_its_gateway_counted_it(session: AsyncSession) -> None:
    now = time.time()
    await set_prices(session, [price(output=3_000_000, since=1.0)])
    await tells(session, at=now)
    await service.record_from_gateways(session, [by_gateway("lost"), by_gateway("coming")])
    assert await service.settle_held(session, now + 1) == []
    later = time.time() + service.MARGIN_S + 1
    await tells(session, by_engine("coming"), at=later, left=3)
    assert await service.settle_held(session, later) == [], "it has more to tell"
    await tells(session, at=later + 1)
    stored = await service.settle_held(session, later + 1)
    assert stored is not None
    assert [(one.attempt_id, one.basis) for one in stored] == [("lost", UsageBasis.COUNTED)]
    assert await rows(session) == {"lost": ("counted", 4, 0.0), "coming": ("engine", 7, 0.25)}
    assert await held(session) == set()
    found = await service.sum_since(session, tenant="demo", since=datetime.fromtimestamp(now - 60, UTC))
    assert (found.attempts, found.output_tokens, found.cost) == (2, 11, 33)
    day = datetime.fromtimestamp(now, UTC).date()
    assert await service.check_sums(session, day - timedelta(days=1), day + timedelta(days=2)) == []


async def test_a_replica_that_says_nothing_is_waited_for_so_long_and_what_it_tells_then_is_set_aside(
    session: AsyncSession,
) -> None:
    now = time.time()
    await tells(session, at=now)
    await service.record_from_gateways(session, [by_gateway("a")])
    assert await service.settle_held(session, now + service.SILENT_S - 30) == []
    assert len(await service.settle_held(session, time.time() + service.SILENT_S + 1) or []) == 1
    late = by_engine("a")
    for n in range(2):
        await tells(session, late, at=time.time() + 700 + n)
    assert await rows(session) == {"a": ("counted", 4, 0.0)}, "what was billed does not change"
    reasons = (await session.scalars(text("SELECT reason FROM usage_refused"))).all()
    assert reasons == [service.LATE]


async def test_a_replica_that_the_fleet_does_not_have_is_not_waited_for(session: AsyncSession) -> None:
    taken = await service.record_from_gateways(session, [by_gateway("a", replica="elsewhere")])
    assert ([one.attempt_id for one in taken.stored], taken.held) == (["a"], 0)


async def test_what_is_held_counts_against_limits_at_once_and_never_twice(session: AsyncSession) -> None:
    now = time.time()
    since = datetime.fromtimestamp(now - 60, UTC)
    await set_prices(session, [price(output=1_000_000, since=1.0)])
    await tells(session, by_engine("told"), at=now)
    await service.record_from_gateways(session, [by_gateway("waits"), by_gateway("other", tenant="globex")])

    async def spent(*, with_held: bool) -> tuple[int, int]:
        found = await service.sum_since(session, tenant="demo", since=since, with_held=with_held)
        return found.output_tokens, found.cost

    assert await spent(with_held=False) == (7, 7)
    assert await spent(with_held=True) == (11, 11)
    before = await completeness(session, time.time())
    assert before.held == 2 and before.complete_until < time.time()
    await tells(session, by_engine("waits"), at=time.time())
    assert await spent(with_held=True) == await spent(with_held=False) == (14, 14)
    await session.execute(
        text("INSERT INTO usage_held SELECT attempt_id, request_id, tenant, project, key_id, pool, model, replica, "
             "boot_epoch, started_at, finished_at, finish, basis, prompt_tokens, cached_tokens, output_tokens, "
             "kv_block_seconds, device_seconds, cost FROM usage_ledger WHERE attempt_id = 'waits'")
    )  # fmt: skip
    assert await spent(with_held=True) == (14, 14), "a row held a moment too long is not counted again"
    await service.settle_held(session, time.time() + service.SILENT_S + 1)
    assert await held(session) == set()
    assert await spent(with_held=True) == (14, 14)


async def test_f38_reporters_and_settlers_at_once_store_each_attempt_once(
    committed_engine: AsyncEngine, rng: random.Random
) -> None:
    attempts = [f"a{n}" for n in range(120)]
    now = time.time()
    async with transaction(committed_engine) as session:
        await tells(session, at=now)

    async def gateway() -> None:
        mine = rng.sample(attempts, len(attempts))
        for begin in range(0, len(mine), 30):
            async with transaction(committed_engine) as session:
                await service.record_from_gateways(session, [by_gateway(one) for one in mine[begin : begin + 30]])

    async def replica(number: int) -> None:
        mine = [by_engine(one) for n, one in enumerate(attempts) if n % 3]
        rng.shuffle(mine)
        for begin in range(0, len(mine), 30):
            async with transaction(committed_engine) as session:
                await service.record(session, mine[begin : begin + 30])

    settler = HeldSettler(committed_engine, clock=lambda: time.time() + service.SILENT_S + 5)
    late = HeldSettler(committed_engine, clock=time.time)
    await asyncio.gather(gateway(), gateway(), replica(0), replica(1), late.settle(), late.settle())
    await asyncio.gather(*(settler.settle() for _ in range(4)))
    async with transaction(committed_engine) as session:
        found = await rows(session)
        assert set(found) == set(attempts)
        assert {one for one in attempts if found[one][0] == "engine"} == {
            one for n, one in enumerate(attempts) if n % 3
        }
        assert await held(session) == set()
        day = datetime.fromtimestamp(now, UTC).date()
        assert await service.check_sums(session, day - timedelta(days=1), day + timedelta(days=2)) == []
