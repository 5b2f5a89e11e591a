"""Leases on a real store under a simulated clock: taking, extending, settling, and what is said about it."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from redis.asyncio import Redis

from controlplane.admission.answers import (
    Cold,
    Ended,
    Ending,
    Granted,
    Holding,
    OutsideWindows,
    Refused,
    Settled,
    ratelimit_headers,
)
from controlplane.admission.charges import NOTHING, Use, Windows, charges_for
from controlplane.quotas.schemas import QuotaKind
from tests.controlplane.admission.leasing import (
    CONCURRENT,
    DAILY,
    DAY_S,
    MONEY,
    MONTHLY,
    OUT,
    RPM,
    TENANT,
    TPM,
    World,
    limit,
    windows_at,
)


@pytest.fixture
async def world(redis: Redis) -> World:
    return await World(redis).start()


def tokens(input: int = 0, output: int = 0) -> Use:
    return Use(input=input, uncached_input=input, output=output)


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


async def test_f4_remaining_falls_at_admission_and_rises_by_the_unused_part_at_settlement(world: World) -> None:
    limits = [limit(TPM, 10_000), limit(OUT, 5_000), limit(MONTHLY, 100_000), limit(MONEY, 9_000_000)]
    await world.hydrate(limits)
    use = Use(input=500, uncached_input=500, output=2_000, money=70_000)
    granted = await world.granted(limits, use)
    assert [one.remaining for one in granted.standings] == [7_500, 3_000, 97_500, 8_930_000]
    await world.advance(20)
    used = Use(input=500, uncached_input=100, output=300, money=9_000)
    assert await world.leases.settle(granted.lease, used) == Settled()
    assert await world.used(*limits) == [800, 300, 800, 9_000]


async def test_f4_the_bucket_in_which_the_reservation_was_made_is_lowered(world: World) -> None:
    limits = [limit(TPM, 1000)]
    first = await world.granted(limits, tokens(0, 900))
    await world.advance(30)
    await world.granted(limits, tokens(0, 100))
    await world.leases.settle(first.lease, tokens(0, 400))
    assert await world.used(*limits) == [500]
    await world.advance(31)
    assert await world.used(*limits) == [100]
    await world.advance(30)
    assert await world.used(*limits) == [0]


async def test_f7_use_above_the_reservation_is_charged_in_full_and_reported(world: World) -> None:
    limits = [limit(OUT, 1000), limit(MONTHLY, 1000)]
    await world.hydrate(limits)
    granted = await world.granted(limits, tokens(0, 900))
    settled = await world.leases.settle(granted.lease, tokens(0, 1_300))
    assert isinstance(settled, Settled)
    assert [(one.kind, one.units) for one in settled.overruns] == [(OUT, 400), (MONTHLY, 400)]
    assert await world.used(*limits) == [1_300, 1_300]
    assert [one.used for one in (await world.refused(limits, tokens(0, 1))).refusals] == [1_300, 1_300]


async def test_release_gives_all_of_it_back(world: World) -> None:
    limits = [limit(RPM, 5), limit(TPM, 1000), limit(CONCURRENT, 1), limit(DAILY, 1000)]
    await world.hydrate(limits, base=7)
    granted = await world.granted(limits, tokens(500))
    assert await world.leases.release(granted.lease) == Settled()
    assert await world.used(*limits) == [0, 0, 0, 7]
    for repeated in (world.leases, world.gateway()):
        assert await repeated.release(granted.lease) == Settled(repeated=True)
    assert await world.used(*limits) == [0, 0, 0, 7]


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


async def test_an_id_is_used_up_by_its_settlement(world: World) -> None:
    limits = [limit(RPM, 5)]
    granted = await world.granted(limits, Use(), "once")
    await world.leases.settle(granted.lease, Use())
    assert await world.acquire(limits, Use(), "once") == Ended(why=Ending.SETTLED)
    assert await world.used(*limits) == [1]


async def test_f12_an_acquire_that_arrives_after_its_own_release_takes_nothing(world: World) -> None:
    limits = [limit(RPM, 5), limit(CONCURRENT, 1)]
    wanted = world.leases._takings.wanted(TENANT, "crossed", world.charges(limits, Use()), 60.0)
    await world.leases.release(wanted)
    assert await world.acquire(limits, Use(), "crossed") == Ended(why=Ending.SETTLED)
    assert await world.used(*limits) == [0, 0]


async def test_f12_a_lost_lease_frees_its_slot_when_its_time_is_over(world: World) -> None:
    limits = [limit(CONCURRENT, 1), limit(MONTHLY, 1000)]
    await world.hydrate(limits)
    lost = await world.granted(limits, tokens(600), ttl_s=30)
    outcome = await world.refused(limits, tokens(100))
    assert outcome.retry_after_s == 30
    await world.advance(30)
    await world.granted(limits, tokens(100))
    assert await world.used(*limits) == [1, 700]
    settled = await world.leases.settle(lost.lease, tokens(50))
    assert settled == Settled(late=True)
    assert await world.used(*limits) == [1, 150]
    assert await world.gateway().settle(lost.lease, tokens(50)) == Settled(late=True, repeated=True)
    assert await world.used(*limits) == [1, 150]


async def test_f12_many_lost_leases_free_their_slots_at_once(world: World) -> None:
    limits = [limit(CONCURRENT, 60)]
    for _ in range(60):
        await world.granted(limits, Use(), ttl_s=30)
    await world.advance(30)
    assert await world.used(*limits) == [0]
    assert (await world.granted(limits, Use())).standings[0].used == 1


async def test_what_expired_long_ago_is_forgotten_and_its_reservation_in_doubt(world: World) -> None:
    limits = [limit(MONTHLY, 1000)]
    await world.hydrate(limits)
    lost = await world.granted(limits, tokens(600), ttl_s=30)
    await world.advance(DAY_S + 31)
    found = await world.granted(limits, tokens(1))
    assert await world.leases.settle(lost.lease, tokens(50)) == Ended(why=Ending.EXPIRED)
    assert await world.used(*limits) == [601]
    assert await world.leases.correct(TENANT, found.doubted[0], 50) is True
    assert await world.used(*limits) == [51]


async def test_records_of_ended_leases_do_not_pile_up(world: World) -> None:
    limits = [limit(RPM, 1000)]
    for _ in range(60):
        for _ in range(5):
            granted = await world.granted(limits, Use(), ttl_s=10)
            await world.leases.settle(granted.lease, Use())
        await world.advance(10)
    assert await world.redis.hlen(f"tidegate:{{{TENANT}}}:leases") <= 5 * 8 + 16


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


async def test_the_latest_part_of_a_lease_is_given_back_first(world: World) -> None:
    limits = [limit(OUT, 1000)]
    granted = await world.granted(limits, tokens(0, 300))
    for _ in range(3):
        await world.advance(25)
        await world.leases.extend(granted.lease, world.charges(limits, Use(requests=0, output=100)))
    assert await world.used(*limits) == [300]
    await world.leases.settle(granted.lease, tokens(0, 450))
    assert await world.used(*limits) == [150]


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


async def test_f12_whoever_took_an_expired_lease_over_fences_off_the_one_before(world: World) -> None:
    limits = [limit(CONCURRENT, 5), limit(MONTHLY, 1000)]
    await world.hydrate(limits)
    granted = await world.granted(limits, tokens(600), ttl_s=10)
    heir = world.gateway()
    told = await heir.reassert([granted.lease])
    assert isinstance(told, tuple)
    assert told[0].state is Holding.FENCED
    await world.advance(11)
    told = await heir.reassert([granted.lease])
    assert isinstance(told, tuple)
    assert told[0].state is Holding.REVIVED
    assert told[0].lease.fence > granted.lease.fence
    assert await world.leases.extend(granted.lease) == Ended(why=Ending.FENCED)
    assert await world.leases.settle(granted.lease, NOTHING) == Ended(why=Ending.FENCED)
    assert await world.used(*limits) == [1, 600]
    assert await heir.settle(told[0].lease, tokens(100)) == Settled()
    assert await world.used(*limits) == [0, 100]


async def test_fences_of_a_tenant_only_grow(world: World) -> None:
    fences = [(await world.granted([], Use())).lease.fence for _ in range(3)]
    await world.advance(-3600)
    fences += [(await world.granted([], Use())).lease.fence for _ in range(3)]
    assert fences == sorted(set(fences))


async def test_a_soft_limit_warns_and_lets_pass(world: World) -> None:
    limits = [limit(TPM, None, soft=500), limit(RPM, 10, soft=1)]
    assert (await world.granted(limits, tokens(400))).warnings == ()
    granted = await world.granted(limits, tokens(400))
    assert [(one.quota_id, one.used, one.soft) for one in granted.warnings] == [
        ("q-tokens_per_minute", 800, 500),
        ("q-requests_per_minute", 2, 1),
    ]
    assert granted.standings[0].remaining is None


async def test_the_headers_are_those_of_the_tightest_limit(world: World) -> None:
    limits = [limit(RPM, 10), limit(TPM, 1000), limit(DAILY, 500), limit(CONCURRENT, 1)]
    await world.hydrate(limits)
    await world.advance(0.25)
    granted = await world.granted(limits, tokens(300))
    assert ratelimit_headers(granted.standings) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "61",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "200",
        "x-ratelimit-reset-tokens": str(DAY_S // 2),
    }


async def test_an_empty_store_never_means_a_fresh_month(world: World) -> None:
    limits = [limit(RPM, 10), limit(MONTHLY, 1000), limit(MONEY, 50)]
    cold = await world.acquire(limits, Use(input=10, money=1))
    assert isinstance(cold, Cold)
    assert [(one.charge.kind, one.start) for one in cold.counters] == [
        (MONTHLY, windows_at(world.now).month[0]),
        (MONEY, windows_at(world.now).month[0]),
    ]
    assert await world.used(limits[0]) == [0]
    assert await world.leases.hydrate(TENANT, cold.counters[0], 995, complete_until=world.now) is True
    assert await world.leases.hydrate(TENANT, cold.counters[0], 5, complete_until=world.now) is False
    assert await world.leases.hydrate(TENANT, cold.counters[1], 0, complete_until=world.now) is True
    outcome = await world.refused(limits, Use(input=10, money=1))
    assert [(one.kind, one.used) for one in outcome.refusals] == [(MONTHLY, 995)]


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


async def test_a_lease_that_outlives_its_window_is_settled_where_it_was_charged(world: World) -> None:
    limits = [limit(DAILY, 1000)]
    await world.hydrate(limits)
    granted = await world.granted(limits, tokens(900), ttl_s=DAY_S)
    yesterday = world.charges(limits, Use())
    await world.advance(DAY_S * 0.6)
    await world.hydrate(limits)
    await world.leases.extend(granted.lease, world.charges(limits, Use(requests=0, output=50)))
    assert await world.used(*limits) == [50]
    await world.leases.settle(granted.lease, tokens(300))
    assert await world.used(*limits) == [0]
    counter = await world.redis.hget(yesterday[0].key, str(yesterday[0].window[0]))
    assert counter == b"300"


async def test_f9_a_day_of_a_zone_that_comes_back_is_summed_anew(world: World) -> None:
    limits = [limit(DAILY, 1000)]
    await world.hydrate(limits)
    first = await world.granted(limits, tokens(100))
    await world.leases.settle(first.lease, tokens(100))
    here = windows_at(world.now)
    east = Windows(day=(here.day[0] - 21_600, here.day[1] - 21_600, here.day[2] - 21_600), month=here.month)
    charges = charges_for(TENANT, limits, tokens(50), east)
    elsewhere = await world.leases.acquire(TENANT, "elsewhere", charges)
    assert isinstance(elsewhere, Cold)
    await world.leases.hydrate(TENANT, elsewhere.counters[0], 100, complete_until=world.now)
    assert isinstance(await world.leases.acquire(TENANT, "elsewhere", charges), Granted)
    back = await world.acquire(limits, tokens(1))
    assert isinstance(back, Cold)
    await world.leases.hydrate(TENANT, back.counters[0], 150, complete_until=world.now)
    assert await world.used(*limits) == [150]
