"""Leases as a whole on a real store under a simulated clock: what is said about them, and what a window has used."""

from __future__ import annotations

from controlplane.admission.answers import (
    Cold,
    Granted,
    ratelimit_headers,
)
from controlplane.admission.charges import Use, Windows, charges_for
from tests.controlplane.admission.leasing import (
    CONCURRENT,
    DAILY,
    DAY_S,
    MONEY,
    MONTHLY,
    RPM,
    TENANT,
    TPM,
    World,
    limit,
    tokens,
    windows_at,
)


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
