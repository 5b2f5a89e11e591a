"""What a tenant's live leases hold is told without taking anything, and told exactly."""

from __future__ import annotations

import pytest

from controlplane.admission import leases
from controlplane.admission.answers import Reserved
from controlplane.admission.charges import Use
from controlplane.quotas.schemas import Limit
from tests.controlplane.admission.leasing import CONCURRENT, DAILY, DAY_S, TENANT, TPM, World, limit

LIMITS = [limit(DAILY, 1000), limit(TPM, 500), limit(CONCURRENT, 5)]


async def held(world: World, *limits: Limit) -> list[int | None]:
    told = await world.leases.reserved(TENANT)
    assert isinstance(told, Reserved), told
    return [told.held(charge, world.now) for charge in world.charges(list(limits), Use())]


async def test_live_leases_are_summed_with_their_extensions_until_they_end(world: World) -> None:
    assert await held(world, *LIMITS) == [0, 0, 0]
    await world.hydrate(LIMITS, 100)
    first = await world.granted(LIMITS, Use(input=10, output=20))
    second = await world.granted(LIMITS, Use(input=1, output=2))
    assert await held(world, *LIMITS) == [33, 33, 2]
    assert await world.used(*LIMITS) == [133, 33, 2]
    more = world.charges(LIMITS[:2], Use(requests=0, output=7))
    await world.leases.extend(first.lease, more)
    assert await held(world, *LIMITS) == [40, 40, 2]
    await world.leases.settle(first.lease, Use(input=10, output=25))
    assert await held(world, *LIMITS) == [3, 3, 1]
    assert await world.used(*LIMITS) == [138, 38, 1]
    await world.leases.release(second.lease)
    assert await held(world, *LIMITS) == [0, 0, 0]


async def test_f12_what_a_dead_gateway_held_is_reserved_until_its_time_is_over(world: World) -> None:
    await world.hydrate(LIMITS)
    await world.granted(LIMITS, Use(input=10), ttl_s=30)
    await world.advance(29)
    assert await held(world, *LIMITS) == [10, 10, 1]
    await world.advance(2)
    assert await held(world, *LIMITS) == [0, 0, 0]


async def test_units_that_have_left_their_window_are_not_held_in_this_one(world: World) -> None:
    await world.hydrate(LIMITS)
    await world.granted(LIMITS, Use(input=10), ttl_s=2 * DAY_S)
    await world.advance(62)
    assert await held(world, *LIMITS) == [10, 0, 1]
    await world.advance(DAY_S)
    assert await held(world, *LIMITS) == [0, 0, 1]


async def test_f12_what_ended_after_the_store_was_lost_is_not_counted_as_live(world: World) -> None:
    """Many of them must not make a tenant's reservations untold."""
    granted = await world.granted([LIMITS[1]], Use(input=10))
    await world.redis.flushdb()
    await world.advance(1)
    await world.leases.settle(granted.lease, Use(input=10))
    assert await world.leases.reserved(TENANT) == Reserved(leases=0, units={})
    assert await world.used(LIMITS[1]) == [10]


async def test_too_many_to_sum_is_said_and_never_a_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_SUMMED", 2)
    for _ in range(3):
        await world.granted([LIMITS[2]], Use())
    told = await world.leases.reserved(TENANT)
    assert told == Reserved(leases=3, units=None)
    assert await held(world, LIMITS[2]) == [None]
