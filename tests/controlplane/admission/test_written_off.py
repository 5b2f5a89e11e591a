"""What leases that ended with their gateway hold of calendar counters comes back, with no overspend meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from redis.asyncio import Redis

from controlplane.admission.answers import HELD_ON, ColdCounter, DoubtedCounter, Granted, Lease, Refused, Settled
from controlplane.admission.charges import Charge, Use
from controlplane.admission.leases import Leases
from controlplane.admission.warm import CORRECTED_AT_ONCE, CORRECTED_EVERY_S, Warmer
from controlplane.admission.wire import keys
from tests.controlplane.admission.leasing import CONCURRENT, DAILY, DAY_S, MONTHLY, TENANT, SlowLedger, World, limit

LIMITS = [limit(MONTHLY, 1000), limit(CONCURRENT, 1000)]
LONG = 3600 + 31


@pytest.fixture
async def world(redis: Redis) -> World:
    world = await World(redis, ttl_s=30).start()
    await world.hydrate(LIMITS[:1], 100)
    return world


def used(units: int) -> Use:
    return Use(input=units)


async def doubt(world: World) -> DoubtedCounter:
    """Of the month, as a request of nothing finds it."""
    found = await world.acquire(LIMITS, used(0))
    assert isinstance(found, Granted)
    await world.leases.settle(found.lease, used(0))
    return found.doubted[0]


async def month(world: World) -> int:
    return (await world.used(LIMITS[0]))[0]


async def test_f14_what_a_killed_gateway_held_of_a_month_comes_back_by_the_ledger(world: World) -> None:
    for _ in range(3):
        await world.granted(LIMITS, used(200))
    await world.advance(3600)
    live = await world.granted(LIMITS, used(90))
    assert live.doubted == ()
    await world.advance(31)
    refused = await world.refused(LIMITS, used(500))
    [counter] = refused.doubted
    assert await month(world) == 790, "nothing comes back before the ledger has been summed"
    assert await world.leases.settle(live.lease, used(40)) == Settled(late=True)
    assert await world.leases.correct(TENANT, counter, 100 + 35) is True
    assert await month(world) == 100 + 35 + 40
    assert await world.leases.correct(TENANT, counter, 100 + 35) is False
    assert (await world.granted(LIMITS, used(500))).doubted == ()


async def test_f14_one_counter_is_summed_once_and_no_request_waits_for_it(world: World) -> None:
    await world.granted(LIMITS, used(800))
    await world.advance(LONG)
    spans: list[tuple[float, float]] = []
    told = 0.0
    at = 0.0

    async def ledger(counter: ColdCounter) -> tuple[int, float]:
        spans.append((counter.start, counter.stop))
        return 150, told

    def charges_at(_: float | None) -> Sequence[Charge]:
        return world.charges(LIMITS, used(500))

    warmer = Warmer(world.leases, monotonic=lambda: at)

    async def ask(name: str) -> Granted | Refused:
        outcome = await warmer.acquire(TENANT, name, charges_at, ledger)
        assert isinstance(outcome, Granted | Refused)
        while warmer._under_way:
            await asyncio.sleep(0)
            await asyncio.gather(*warmer._under_way.values())
        return outcome

    since = world.now
    assert isinstance(await ask("a"), Refused)
    assert spans == []
    at = CORRECTED_EVERY_S
    assert isinstance(await ask("b"), Refused)
    assert [stop for _, stop in spans] == [pytest.approx(since)]
    assert isinstance(await ask("c"), Refused)
    assert len(spans) == 1, "a ledger that is behind is not asked again at once"
    told, at = world.now, 2 * CORRECTED_EVERY_S
    assert isinstance(await ask("d"), Refused)
    assert isinstance(await ask("e"), Granted)
    assert len(spans) == 2
    assert await month(world) == 150 + 500


async def test_f15_few_corrections_at_once_however_many_counters_a_dead_gateway_left(world: World) -> None:
    limits = [LIMITS[1], *(limit(MONTHLY, 1000, scope_id=f"project-{number}") for number in range(12))]
    await world.hydrate(limits[1:])
    await world.granted(limits, used(1))
    await world.advance(LONG)
    counters = (await world.granted(limits, used(1))).doubted
    assert len(counters) == 12
    at, ledger = 0.0, SlowLedger(world)
    warmer = Warmer(world.leases, monotonic=lambda: at, later=lambda *_: None)
    for _ in range(2):
        for counter in counters:
            warmer.doubt(TENANT, counter, ledger)
        at += CORRECTED_EVERY_S
    await asyncio.gather(*warmer._under_way.values())
    assert ledger.most == CORRECTED_AT_ONCE
    assert await world.used(*limits[1:]) == [1] * 12


async def test_f14_a_sum_that_does_not_end_is_given_up_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its caller has for a bound: nobody waits for it who could notice."""
    monkeypatch.setattr("controlplane.admission.warm.LONGEST_S", 0.05)
    await world.granted(LIMITS, used(800))
    await world.advance(LONG)
    [counter] = (await world.refused(LIMITS, used(500))).doubted
    at, tries = 0.0, 0

    async def ledger(_: ColdCounter) -> tuple[int, float]:
        nonlocal tries
        tries += 1
        if tries == 1:
            await asyncio.Event().wait()
        return 150, world.now

    warmer = Warmer(world.leases, monotonic=lambda: at, later=lambda *_: None)
    for _ in range(3):
        warmer.doubt(TENANT, counter, ledger)
        async with asyncio.timeout(5):
            await asyncio.gather(*warmer._under_way.values())
        at += CORRECTED_EVERY_S
    assert tries == 2
    assert await month(world) == 150


async def test_f14_a_lease_written_off_is_made_whole_when_its_holder_comes_back(world: World) -> None:
    mine = await world.granted(LIMITS, used(300))
    await world.advance(LONG)
    counter = await doubt(world)
    assert await world.leases.correct(TENANT, counter, 100) is True
    assert await month(world) == 100
    longer = await world.leases.extend(mine.lease, world.charges(LIMITS, Use(requests=0, output=50)))
    assert isinstance(longer, Granted), longer
    assert await month(world) == 450
    assert await world.leases.settle(longer.lease, used(120)) == Settled()
    assert await month(world) == 220


@pytest.mark.parametrize("before", [True, False])
async def test_f14_an_ending_told_after_the_writing_off_counts_once(world: World, before: bool) -> None:
    """What ended before the doubt began is in the ledger's sum, what ended after is not."""
    mine = await world.granted(LIMITS, used(300))
    ended = world.now + 20
    await world.advance(LONG)
    counter = await doubt(world)
    if not before:
        await world.advance(5)
        ended = world.now
    late = world.gateway(wall=lambda: ended)
    late._endings._holder = world.leases._endings._holder
    assert await late.settle(mine.lease, used(60)) == Settled(late=True)
    assert await world.leases.correct(TENANT, counter, 160 if before else 100) is True
    assert await month(world) == 160


async def test_f14_many_leases_that_expire_together_are_all_written_off(world: World) -> None:
    limits = [limit(DAILY, 10_000), limit(CONCURRENT, 1000)]
    await world.hydrate(limits[:1])
    for number in range(300):
        await world.advance(0.000_001 * (number % 64 == 0))
        await world.granted(limits, used(1))
    await world.advance(LONG)
    for _ in range(4):
        await world.advance(2)
        found = await world.granted(limits, used(0))
        await world.leases.settle(found.lease, used(0))
    while found.doubted:
        await world.leases.correct(TENANT, found.doubted[0], 0)
        found = await world.granted(limits, used(0))
    assert await world.used(limits[0]) == [0]


@dataclass
class Ledger:
    """Every attempt's use with when it ended, whoever told it."""

    rows: list[tuple[float, int]] = field(default_factory=list)

    def before(self, at: float) -> int:
        return sum(units for ended, units in self.rows if ended < at)


@pytest.mark.parametrize("seed", range(8))
async def test_f14_random_crashes_end_at_the_ledgers_truth_and_never_below_it(redis: Redis, seed: int) -> None:
    dice = random.Random(seed)
    world = await World(redis, ttl_s=30).start()
    world.now_us -= 11 * 3600 * 1_000_000
    await world.advance(0)
    limits = [limit(DAILY, 10**9)]
    await world.hydrate(limits)
    ledger = Ledger()
    gateways: list[tuple[Leases, list[Lease]]] = [(world.gateway(ttl_s=30), []) for _ in range(3)]
    doubts: list[DoubtedCounter] = []
    for _ in range(150):
        await world.advance(dice.uniform(1, 90) if dice.random() < 0.9 else 1900)
        which = dice.randrange(3)
        leases, held = gateways[which]
        choice = dice.random()
        if choice < 0.45:
            world.leases = leases
            found = await world.granted(limits, used(dice.randrange(1, 100)))
            held.append(found.lease)
            doubts += found.doubted
        elif choice < 0.65 and held:
            lease = held.pop(dice.randrange(len(held)))
            units = dice.randrange(120)
            ledger.rows.append((world.now, units))
            await leases.settle(lease, used(units))
        elif choice < 0.75:  # killed: what ran has used something, which its replica tells
            ledger.rows += [(world.now, dice.randrange(lease.charges[0].amount + 1)) for lease in held]
            gateways[which] = (world.gateway(ttl_s=30), [])
        elif doubts:
            counter = doubts.pop(dice.randrange(len(doubts)))
            await leases.correct(TENANT, counter, ledger.before(counter.since))
        for other, its in gateways:
            told = await other.reassert(its)
            assert isinstance(told, tuple)
            assert all(one.state in HELD_ON for one in told)
        live = sum(lease.charges[0].amount for _, its in gateways for lease in its)
        assert (await world.used(*limits))[0] >= ledger.before(world.now + 1) + live
    for wait_s in (LONG, 10, 10, 10):
        await world.advance(wait_s)
        for other, its in gateways:
            await other.reassert(its)
        found = await world.granted(limits, used(0))
        for counter in found.doubted:
            await world.leases.correct(TENANT, counter, ledger.before(counter.since))
    live = sum(lease.charges[0].amount for _, its in gateways for lease in its)
    assert await world.used(*limits) == [ledger.before(world.now + 1) + live]


MONTH = 30 * DAY_S


@pytest.fixture
async def month_begun(redis: Redis) -> World:
    """A month of which nothing is over yet, and 100 of it used."""
    world = await World(redis, ttl_s=30).start()
    await world.advance(MONTH - world.now % MONTH + 60)
    await world.hydrate(LIMITS[:1], 100)
    return world


async def test_f14_what_is_known_of_dead_leases_outlives_any_window(month_begun: World) -> None:
    await month_begun.granted(LIMITS, used(800))
    for key in keys(TENANT, []):
        assert await month_begun.redis.pttl(key) / 1000 > 31 * DAY_S + 2 * 3600, key


async def test_f14_a_look_at_a_quiet_tenants_standings_has_a_dead_leases_part_of_the_month_corrected(
    month_begun: World,
) -> None:
    """Nobody sends a request: neither when the gateway died nor after."""
    world, at = month_begun, 0.0
    await world.granted(LIMITS, used(800))
    await world.advance(9 * DAY_S)
    told: list[DoubtedCounter] = []
    charges = world.charges(LIMITS[:1], used(0))
    [standing] = await world.leases.standings(TENANT, charges, told.append)  # type: ignore[misc]
    assert (standing.used, len(told)) == (900, 1), "nothing comes back before the ledger has been summed"
    waits: list[tuple[float, Callable[[], object]]] = []

    def later(seconds: float, call: Callable[..., object], *arguments: object) -> None:
        waits.append((seconds, partial(call, *arguments)))

    async def ledger(counter: ColdCounter) -> tuple[int, float]:
        return 150, world.now

    warmer = Warmer(world.leases, monotonic=lambda: at, later=later)
    for _ in range(3):
        warmer.doubt(TENANT, told[0], ledger)
    [(seconds, call)] = waits
    assert seconds == CORRECTED_EVERY_S
    at += seconds
    call()
    await asyncio.gather(*warmer._under_way.values())
    assert await month(world) == 150
    call()
    assert not warmer._under_way, "what was corrected is not summed again"
