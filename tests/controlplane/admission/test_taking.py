"""Taking leases, and more for them, on a real store under a simulated clock."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from controlplane.admission.answers import (
    Cold,
    Granted,
    OutsideWindows,
    Refused,
    Settled,
)
from controlplane.admission.charges import Use
from controlplane.quotas.schemas import QuotaKind
from tests.controlplane.admission.leasing import (
    CONCURRENT,
    DAILY,
    DAY_S,
    MONTHLY,
    OUT,
    RPM,
    TENANT,
    TPM,
    World,
    limit,
    tokens,
    windows_at,
)


async def test_f2_of_200_concurrent_requests_with_room_for_one_exactly_one_passes(world: World) -> None:
    for limits in ([limit(RPM, 1)], [limit(CONCURRENT, 1)], [limit(TPM, 1500)], [limit(DAILY, 1500)]):
        if limits[0].kind is DAILY:
            await world.hydrate(limits)
        asked = (world.acquire(limits, tokens(500, 500)) for _ in range(200))
        outcomes = await asyncio.gather(*asked)
        assert sum(isinstance(one, Granted) for one in outcomes) == 1
        assert sum(isinstance(one, Refused) for one in outcomes) == 199


async def test_every_lease_of_a_request_is_taken_or_none(world: World) -> None:
    limits = [limit(RPM, 10), limit(TPM, 1000), limit(CONCURRENT, 10)]
    await world.granted(limits, tokens(600))
    outcome = await world.refused(limits, tokens(600))
    assert [one.kind for one in outcome.refusals] == [TPM]
    assert await world.used(*limits) == [1, 600, 1]


@pytest.mark.parametrize("kind", [RPM, TPM])
async def test_f11_waiting_exactly_that_long_makes_the_same_request_pass(world: World, kind: QuotaKind) -> None:
    rng, limits, refusals = random.Random(11), [limit(kind, 60)], 0
    for _ in range(400):
        await world.advance(rng.choice([0, 0.000_001, 0.3, 1, 2.7, 9]))
        use = Use(requests=rng.randint(1, 40), input=rng.randint(1, 60))
        outcome = await world.acquire(limits, use)
        if isinstance(outcome, Granted):
            continue
        assert isinstance(outcome, Refused)
        assert outcome.exact
        assert outcome.retry_after_s is not None
        refusals += 1
        await world.advance(outcome.retry_after_s - 0.000_001)
        assert isinstance(await world.acquire(limits, use), Refused)
        await world.advance(0.000_001)
        await world.granted(limits, use)
    assert refusals > 50


async def test_f11_a_calendar_refusal_lasts_until_the_window_ends(world: World) -> None:
    limits = [limit(DAILY, 1000)]
    await world.hydrate(limits, base=900)
    outcome = await world.refused(limits, tokens(200))
    assert outcome.retry_after_s == windows_at(world.now).day[1] - world.now
    await world.advance(outcome.retry_after_s)
    await world.hydrate(limits)
    await world.granted(limits, tokens(200))


async def test_f11_several_limits_are_waited_for_together(world: World) -> None:
    limits = [limit(RPM, 1), limit(TPM, 1000)]
    await world.granted(limits, tokens(400))
    await world.advance(10)
    await world.granted([limits[1]], tokens(500))
    outcome = await world.refused(limits, tokens(600))
    assert [one.kind for one in outcome.refusals] == [TPM, RPM]
    assert outcome.retry_after_s is not None
    await world.advance(outcome.retry_after_s)
    await world.granted(limits, tokens(600))


async def test_more_than_the_limit_itself_can_never_pass(world: World) -> None:
    outcome = await world.refused([limit(TPM, 1000), limit(RPM, 5)], tokens(1001))
    assert outcome.never
    assert outcome.retry_after_s is None
    assert [(one.kind, one.limit, one.amount) for one in outcome.refusals] == [(TPM, 1000, 1001)]


async def test_f11_a_slot_is_estimated_from_how_long_leases_are_held(world: World) -> None:
    limits = [limit(CONCURRENT, 2)]
    for _ in range(8):
        granted = await world.granted(limits, Use())
        await world.advance(4)
        await world.leases.settle(granted.lease, Use())
    await world.granted(limits, Use())
    await world.granted(limits, Use())
    outcome = await world.refused(limits, Use())
    assert not outcome.exact
    assert outcome.retry_after_s == pytest.approx(4 * 2.3 / 2)


async def test_no_window_of_a_minute_ever_admits_more(world: World) -> None:
    rng, limits, admitted = random.Random(1), [limit(TPM, 500)], []
    for _ in range(800):
        await world.advance(rng.random() * 1.5)
        use = tokens(rng.randint(1, 90))
        if isinstance(await world.acquire(limits, use), Granted):
            admitted.append((world.now_us, use.input))
    for end, _ in admitted:
        assert sum(units for at, units in admitted if end - 60_000_000 < at <= end) <= 500
    assert sum(units for _, units in admitted) > 0.8 * 500 * (admitted[-1][0] - admitted[0][0]) / 60e6


async def test_a_clock_that_goes_back_lets_nothing_more_through(world: World) -> None:
    limits = [limit(RPM, 3)]
    for _ in range(3):
        await world.granted(limits, Use())
        await world.advance(1)
    await world.advance(-600)
    outcome = await world.refused(limits, Use())
    assert outcome.retry_after_s is not None
    assert 0 < outcome.retry_after_s <= 61
    await world.advance(outcome.retry_after_s)
    await world.granted(limits, Use())


async def test_a_repeated_acquire_is_answered_with_the_same_lease(world: World) -> None:
    limits = [limit(RPM, 5), limit(CONCURRENT, 5)]
    first = await world.granted(limits, Use(), "once")
    again = await world.granted(limits, Use(), "once")
    assert again == msgspec.structs.replace(first, repeated=True)
    assert await world.used(*limits) == [1, 1]


async def test_a_refusal_leaves_nothing_behind_and_its_repeat_is_judged_anew(world: World) -> None:
    limits = [limit(RPM, 1)]
    other = await world.granted(limits, Use())
    await world.refused(limits, Use(), "late")
    await world.leases.release(other.lease)
    await world.granted(limits, Use(), "late")


async def test_an_extension_takes_all_or_nothing_and_keeps_the_lease(world: World) -> None:
    limits = [limit(OUT, 1000), limit(MONTHLY, 700), limit(CONCURRENT, 1)]
    await world.hydrate(limits)
    granted = await world.granted(limits, tokens(0, 500), ttl_s=30)
    await world.advance(20)
    more = world.charges(limits, Use(requests=0, output=200))
    longer = await world.leases.extend(granted.lease, more)
    assert isinstance(longer, Granted)
    assert longer.lease.expires_at == world.now + 30
    assert await world.used(*limits) == [700, 700, 1]
    refused = await world.leases.extend(longer.lease, more)
    assert isinstance(refused, Refused)
    assert [one.kind for one in refused.refusals] == [MONTHLY]
    assert await world.used(*limits) == [700, 700, 1]
    assert await world.leases.settle(longer.lease, tokens(0, 550)) == Settled()
    assert await world.used(*limits) == [550, 550, 0]


async def test_a_repeated_extension_takes_nothing_again(world: World) -> None:
    limits = [limit(OUT, 1000)]
    granted = await world.granted(limits, tokens(0, 100))
    step = world.leases.next_step()
    more = world.charges(limits, Use(requests=0, output=200))
    for repeated in (False, True, True):
        outcome = await world.leases.extend(granted.lease, more, step=step)
        assert isinstance(outcome, Granted)
        assert outcome.repeated is repeated
    assert await world.used(*limits) == [300]


async def test_parts_of_a_long_lease_are_bounded(world: World) -> None:
    limits = [limit(OUT, 100_000)]
    granted = await world.granted(limits, tokens(0, 1))
    for _ in range(300):
        await world.advance(1)
        await world.leases.extend(granted.lease, world.charges(limits, Use(requests=0, output=10)))
    packed = await world.redis.hget(f"tidegate:{{{TENANT}}}:leases", granted.lease.lease_id)
    assert packed is not None
    assert len(msgspec.msgpack.decode(packed)[6]) <= 63
    await world.leases.settle(granted.lease, tokens(0, 2_991))
    assert await world.used(*limits) == [600]


async def test_a_lease_that_expired_is_extended_only_into_a_free_slot(world: World) -> None:
    limits = [limit(CONCURRENT, 1)]
    slow = await world.granted(limits, Use(), ttl_s=10)
    await world.advance(11)
    other = await world.granted(limits, Use())
    assert isinstance(await world.leases.extend(slow.lease), Refused)
    await world.leases.release(other.lease)
    assert isinstance(await world.leases.extend(slow.lease), Granted)
    await world.refused(limits, Use())


async def test_the_servers_time_picks_the_window(world: World) -> None:
    limits = [limit(DAILY, 1000)]
    charges = world.charges(limits, tokens(100))
    await world.hydrate(limits)
    assert isinstance(await world.leases.acquire(TENANT, "a", charges), Granted)
    await world.advance(DAY_S)
    cold = await world.leases.acquire(TENANT, "b", charges)
    assert isinstance(cold, Cold)
    assert cold.counters[0].start == charges[0].window[1]
    await world.advance(DAY_S)
    outside = await world.leases.acquire(TENANT, "c", charges)
    assert outside == OutsideWindows(now=world.now)
    await world.advance(-3 * DAY_S)
    assert isinstance(await world.leases.acquire(TENANT, "d", charges), OutsideWindows)


async def test_a_soft_limit_warns_and_lets_pass(world: World) -> None:
    limits = [limit(TPM, None, soft=500), limit(RPM, 10, soft=1)]
    assert (await world.granted(limits, tokens(400))).warnings == ()
    granted = await world.granted(limits, tokens(400))
    assert [(one.quota_id, one.used, one.soft) for one in granted.warnings] == [
        ("q-tokens_per_minute", 800, 500),
        ("q-requests_per_minute", 2, 1),
    ]
    assert granted.standings[0].remaining is None
