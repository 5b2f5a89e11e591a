"""Holding on to leases on a real store under a simulated clock, and losing them."""

from __future__ import annotations

from redis.asyncio import Redis

from controlplane.admission.answers import (
    Cold,
    Ended,
    Ending,
    Granted,
    Holding,
    Refused,
    Settled,
)
from controlplane.admission.charges import NOTHING, Use, charges_for
from tests.controlplane.admission.leasing import (
    CONCURRENT,
    DAY_S,
    MONTHLY,
    TENANT,
    TPM,
    World,
    heal,
    limit,
    tokens,
    windows_at,
)


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


async def test_f12_trouble_with_one_tenants_keys_ends_no_heartbeat(redis: Redis) -> None:
    world = await World(redis).start()
    limits = [limit(CONCURRENT, 1)]
    await world.granted(limits, Use(), ttl_s=30)
    await world.leases.acquire("other", "theirs", charges_for("other", limits, Use(), windows_at(world.now)), ttl_s=30)
    await redis.set("tidegate:{other}:leases", "not a hash")
    for _ in range(4):
        await world.advance(20)
        await world.leases.beat()
    assert await world.used(*limits) == [1]


async def test_a_store_that_comes_back_empty_is_told_what_is_held(redis: Redis) -> None:
    world = await World(redis).start()
    limits = [limit(TPM, 1000), limit(CONCURRENT, 4), limit(MONTHLY, 5_000)]
    await world.hydrate(limits[2:], base=700)
    held = [await world.granted(limits, Use(input=100)) for _ in range(3)]
    longer = await world.leases.extend(held[0].lease, world.charges(limits, Use(requests=0, input=50)))
    assert isinstance(longer, Granted)
    done = await world.granted(limits, Use(input=400))
    await world.leases.settle(done.lease, Use(input=40))
    await redis.flushdb()
    await world.advance(1)
    cold = await world.acquire(limits, Use(input=100))
    assert isinstance(cold, Cold)
    await heal(world.leases)
    await world.leases.hydrate(TENANT, cold.counters[0], 740, complete_until=world.now)
    assert await world.used(*limits) == [350, 3, 740 + 350]
    await world.leases.reassert([one.lease for one in held])
    assert await world.used(*limits) == [350, 3, 740 + 350]
    await world.granted(limits, Use(input=100))
    assert isinstance(await world.acquire(limits, Use(input=100)), Refused)
    await world.leases.settle(held[0].lease, Use(input=30))
    assert await world.used(*limits) == [330, 3, 740 + 330]


async def test_an_extension_brings_a_lost_lease_back(redis: Redis) -> None:
    world = await World(redis).start()
    limits = [limit(TPM, 1000), limit(CONCURRENT, 1)]
    granted = await world.granted(limits, Use(input=100))
    await redis.flushdb()
    await world.advance(1)
    longer = await world.leases.extend(granted.lease, world.charges(limits, Use(requests=0, input=50)))
    assert isinstance(longer, Granted)
    assert await world.used(*limits) == [150, 1]


async def test_f12_a_heartbeat_keeps_leases_and_ends_with_the_longest_time(redis: Redis) -> None:
    world = await World(redis, longest_s=100.0).start()
    limits = [limit(CONCURRENT, 1)]
    await world.granted(limits, Use(), ttl_s=30)
    for _ in range(4):
        await world.advance(20)
        await world.leases.beat()
        assert await world.used(*limits) == [1]
    await world.advance(45)
    await world.leases.beat()
    assert await world.used(*limits) == [0]
