"""Ending leases on a real store under a simulated clock: what is given back, what is charged, and only once."""

from __future__ import annotations

from redis.asyncio import Redis

from controlplane.admission.answers import (
    Cold,
    Ended,
    Ending,
    Settled,
)
from controlplane.admission.charges import NOTHING, Use
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
    tokens,
)


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


async def test_records_of_ended_leases_do_not_pile_up(world: World) -> None:
    limits = [limit(RPM, 1000)]
    for _ in range(60):
        for _ in range(5):
            granted = await world.granted(limits, Use(), ttl_s=10)
            await world.leases.settle(granted.lease, Use())
        await world.advance(10)
    assert await world.redis.hlen(f"tidegate:{{{TENANT}}}:leases") <= 5 * 8 + 16


async def test_the_latest_part_of_a_lease_is_given_back_first(world: World) -> None:
    limits = [limit(OUT, 1000)]
    granted = await world.granted(limits, tokens(0, 300))
    for _ in range(3):
        await world.advance(25)
        await world.leases.extend(granted.lease, world.charges(limits, Use(requests=0, output=100)))
    assert await world.used(*limits) == [300]
    await world.leases.settle(granted.lease, tokens(0, 450))
    assert await world.used(*limits) == [150]


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


async def test_what_ended_before_a_counter_was_hydrated_is_not_charged_again(redis: Redis) -> None:
    world = await World(redis).start()
    limits = [limit(MONTHLY, 5_000)]
    await world.hydrate(limits)
    early, late = [await world.granted(limits, Use(input=100)) for _ in range(2)]
    await redis.flushdb()
    await world.advance(10)
    ledger = world.gateway()
    cold = await ledger.acquire(TENANT, "other", world.charges(limits, Use(input=1)))
    assert isinstance(cold, Cold)
    await ledger.hydrate(TENANT, cold.counters[0], 30, complete_until=world.now)
    assert await world.leases.settle(early.lease, Use(input=30)) == Settled()
    assert await world.used(*limits) == [30]
    await world.advance(1)
    assert await world.leases.settle(late.lease, Use(input=20)) == Settled()
    assert await world.used(*limits) == [50]


async def test_f12_a_fenced_or_forgotten_lease_says_so(redis: Redis) -> None:
    world = await World(redis).start()
    lease = (await world.granted([limit(RPM, 5)], Use(), ttl_s=5)).lease
    await world.advance(86_400 + 6)
    await world.granted([limit(RPM, 5)], Use())
    assert await world.gateway().extend(lease) == Ended(why=Ending.EXPIRED)
    assert await world.leases.settle(lease, NOTHING) == Ended(why=Ending.EXPIRED)
