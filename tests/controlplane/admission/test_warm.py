"""A lease is taken whatever the store has forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from controlplane.admission.answers import ColdCounter, Ended, Granted, Refused
from controlplane.admission.charges import Charge, Use, charges_for
from controlplane.admission.warm import HYDRATED_AT_ONCE, StoreRestlessError, Warmer
from controlplane.quotas.schemas import QuotaKind
from tests.controlplane.admission.leasing import DAILY, MONTHLY, TENANT, SlowLedger, World, limit, windows_at

LIMITS = [limit(DAILY, 1000), limit(MONTHLY, 1000)]


def charges_at(now: float) -> Sequence[Charge]:
    return charges_for(TENANT, LIMITS, Use(input=10), windows_at(now))


async def test_many_requests_wait_for_one_sum_of_each_cold_counter(redis: Redis) -> None:
    world = await World(redis).start()
    summed: list[QuotaKind] = []
    summing: set[QuotaKind] = set()

    async def ledger(counter: ColdCounter) -> tuple[int, float]:
        kind = counter.charge.kind
        assert kind not in summing, "two sums of one counter at once"
        summed.append(kind)
        summing.add(kind)
        await asyncio.sleep(0.1)
        summing.remove(kind)
        return 905, world.now

    warmer = Warmer(world.leases)
    asked = [warmer.acquire(TENANT, f"lease-{i}", lambda now: charges_at(now or world.now), ledger) for i in range(50)]
    outcomes = await asyncio.gather(*asked)
    assert set(summed) == {DAILY, MONTHLY}
    assert len(summed) < len(outcomes) / 5
    assert sum(isinstance(one, Granted) for one in outcomes) == 9
    assert sum(isinstance(one, Refused) for one in outcomes) == 41


async def test_f15_few_sums_at_once_however_many_tenants_counters_are_cold(redis: Redis) -> None:
    """A store that comes back empty must not take every connection to the ledger's database from all else."""
    world = await World(redis).start()
    ledger, warmer = SlowLedger(world), Warmer(world.leases)

    async def ask(tenant: str) -> Granted | Refused | Ended:
        def charges(now: float | None) -> Sequence[Charge]:
            return charges_for(tenant, LIMITS, Use(input=10), windows_at(now or world.now))

        return await warmer.acquire(tenant, f"of {tenant}", charges, ledger)

    outcomes = await asyncio.gather(*(ask(f"tenant-{number}") for number in range(20)))
    assert all(isinstance(one, Granted) for one in outcomes)
    assert ledger.most == HYDRATED_AT_ONCE


async def test_windows_are_computed_again_for_the_servers_time(redis: Redis) -> None:
    world = await World(redis).start()

    async def ledger(_: ColdCounter) -> tuple[int, float]:
        return 0, world.now

    late = world.now - 5 * 86_400
    outcome = await Warmer(world.leases).acquire(TENANT, "one", lambda now: charges_at(now or late), ledger)
    assert isinstance(outcome, Granted)
    assert outcome.lease.charges[0].window == windows_at(world.now).day


async def test_a_ledger_that_cannot_be_summed_is_told_to_all_and_asked_again(redis: Redis) -> None:
    world = await World(redis).start()
    failures = iter([True, True, False, False])

    async def ledger(_: ColdCounter) -> tuple[int, float]:
        while world.leases.tally.cold < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # for whoever was answered last to find it under way
        if next(failures):
            raise ConnectionError("no database")
        return 0, world.now

    warmer = Warmer(world.leases)
    asked = [warmer.acquire(TENANT, f"lease-{i}", lambda now: charges_at(now or world.now), ledger) for i in range(3)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, ConnectionError) for one in outcomes)
    assert isinstance(await warmer.acquire(TENANT, "next", lambda now: charges_at(now or world.now), ledger), Granted)


async def test_f14_nobody_waits_for_ever_for_a_sum_that_does_not_end(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those who come later and find it under way."""
    monkeypatch.setattr("controlplane.admission.warm.LONGEST_S", 0.05)
    world = await World(redis).start()
    never = asyncio.Event()

    async def ledger(_: ColdCounter) -> tuple[int, float]:
        await never.wait()
        return 0, world.now

    warmer = Warmer(world.leases)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await warmer.acquire(TENANT, "waits", lambda now: charges_at(now or world.now), ledger)
    never.set()
    async with asyncio.timeout(10):
        await warmer.acquire(TENANT, "warm", lambda now: charges_at(now or world.now), ledger)


async def test_a_counter_that_never_gets_warm_is_given_up(redis: Redis) -> None:
    world = await World(redis).start()
    summed = 0

    async def ledger(counter: ColdCounter) -> tuple[int, float]:
        nonlocal summed
        summed += 1
        await world.advance(86_400)  # each sum takes so long that the day is over
        return 0, world.now

    limits = [limit(DAILY, 1000)]

    def days(now: float | None) -> Sequence[Charge]:
        return charges_for(TENANT, limits, Use(input=10), windows_at(now or world.now))

    with pytest.raises(StoreRestlessError):
        await Warmer(world.leases).acquire(TENANT, "one", days, ledger)
    assert summed <= 4
