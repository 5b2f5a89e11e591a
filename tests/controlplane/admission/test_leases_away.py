"""Leases while the store is stopped, killed, empty, or left by whoever asked."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisAwayError
from redis.exceptions import ResponseError

from controlplane.admission import scripts
from controlplane.admission.answers import Basis, Cold, Ended, Ending, Granted, Lease, Refused, Settled
from controlplane.admission.bound import overspend_bound
from controlplane.admission.charges import NOTHING, Use, charges_for
from controlplane.admission.leases import Leases
from controlplane.local.valkey import EmbeddedValkey
from controlplane.quotas.schemas import Away, Limit
from controlplane.redis_client import create_redis
from controlplane.redis_pipe import ScriptPipe
from controlplane.settings import Secret
from tests.controlplane.admission.leasing import CONCURRENT, MONTHLY, RPM, TENANT, TPM, World, limit, windows_at
from tests.services import free_port, service_folder

DEADLINE_S = 0.25
SLACK = 4
"""How much later than its deadline a decision may come on a machine that does other work."""


class Stoppable:
    """A Valkey of a test's own."""

    def __init__(self, server: EmbeddedValkey) -> None:
        self.server = server
        self.stopped = False

    @property
    def url(self) -> str:
        return self.server.url

    def stop(self) -> None:
        assert self.server.child is not None
        self.server.child.send(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        assert self.server.child is not None
        self.server.child.send(signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        assert self.server.child is not None
        self.server.child.stop(signal.SIGKILL, 10)
        self.server.stop()


@contextmanager
def a_store() -> Iterator[Stoppable]:
    with service_folder("valkey") as folder:
        store = Stoppable(EmbeddedValkey(folder / "data", free_port()))
        store.server.start()
        try:
            yield store
        finally:
            if store.stopped:
                store.go_on()
            store.server.stop()


@pytest.fixture
def store() -> Iterator[Stoppable]:
    with a_store() as store:
        yield store


@asynccontextmanager
async def a_gateway(url: str, **options: Any) -> AsyncIterator[Leases]:
    pipe = ScriptPipe(Secret(url))
    leases = Leases(pipe, **{"deadline_s": DEADLINE_S, **options})
    try:
        yield leases
    finally:
        await leases.close()
        await pipe.close()


async def ask(leases: Leases, limits: list[Limit], lease_id: str, use: Use | None = None) -> Any:
    charges = charges_for(TENANT, limits, use or Use(), windows_at(time.time()))
    return await leases.acquire(TENANT, lease_id, charges)


async def heal(leases: Leases) -> None:
    """Go on until the store answers again, and what it was not told is told."""
    async with asyncio.timeout(60):
        while leases.is_away or leases.deferred or leases._tasks:
            await leases.beat()
            await asyncio.sleep(0.02)


async def used(leases: Leases, limits: list[Limit]) -> list[int]:
    found = await leases.standings(TENANT, charges_for(TENANT, limits, Use(), windows_at(time.time())))
    assert isinstance(found, tuple), found
    return [one.used for one in found]


async def refuse_writes(store: Stoppable, refused: bool) -> None:
    """As with too few replicas, or a disk that is full."""
    async with Redis.from_url(store.url) as operator:
        await operator.config_set("min-replicas-to-write", int(refused))


async def test_f14_what_a_store_that_takes_no_writes_was_not_told_is_told_later(store: Stoppable) -> None:
    limits = [limit(CONCURRENT, 2)]
    async with a_gateway(store.url) as leases:
        held = await ask(leases, limits, "held")
        await refuse_writes(store, True)
        assert await leases.settle(held.lease, Use()) == Settled(deferred=True)
        await leases.beat()
        await refuse_writes(store, False)
        await heal(leases)
        assert await used(leases, limits) == [0]


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


class Garbled:
    """A store's script, in whose way stands what `trouble` says: an error raised, or an answer in place of its own."""

    def __init__(self, script: scripts.Script) -> None:
        self.script = script
        self.trouble: bytes | Exception | None = None

    async def __call__(self, keys: Sequence[str], args: Sequence[bytes]) -> Any:
        if isinstance(self.trouble, Exception):
            raise self.trouble
        answer = await self.script(keys, args)
        return answer if self.trouble is None else self.trouble


async def test_f14_a_store_that_answers_nonsense_once_is_asked_again(redis: Redis) -> None:
    clock = 100.0
    lua = {name: Garbled(script) for name, script in scripts.register(redis).items()}
    leases = Leases(redis, lua=lua, deadline_s=10.0, monotonic=lambda: clock)
    limits = [limit(CONCURRENT, 1)]
    lua["acquire"].trouble = RedisAwayError("gone")
    assert isinstance(await ask(leases, limits, "away"), Refused)
    assert leases.is_away
    clock += 10
    for nonsense in (b"\xc1", b""):
        lua["acquire"].trouble = nonsense
        with pytest.raises(ResponseError):
            await ask(leases, limits, "odd")
    lua["acquire"].trouble = None
    await leases.beat()
    async with asyncio.timeout(10):
        while leases.deferred:
            await asyncio.sleep(0.01)
    assert isinstance(await ask(leases, limits, "again"), Granted)
    await leases.close()


@pytest.mark.parametrize("how", ["stopped", "killed", "refusing"])
async def test_f14_each_limit_does_what_it_declares_by_the_deadline(store: Stoppable, how: str) -> None:
    closed, local = limit(RPM, 100), limit(RPM, 100, away=Away.LOCAL, local=3)
    opened, warning = limit(RPM, 1, away=Away.OPEN), limit(TPM, None, soft=1)
    async with a_gateway(store.url) as leases:
        assert isinstance(await ask(leases, [closed], "before"), Granted)
        if how == "refusing":
            await refuse_writes(store, True)
        else:
            store.stop() if how == "stopped" else store.kill()
        waits, outcomes = [], []
        for number, limits in enumerate([[closed], [closed, opened], [warning], [opened], *[[local]] * 4]):
            began = time.monotonic()
            outcomes.append(await ask(leases, limits, f"away-{number}"))
            waits.append(time.monotonic() - began)
        assert max(waits) <= DEADLINE_S * SLACK
        assert sum(waits) <= DEADLINE_S * SLACK * 2, "only who tries waits"
        assert all(isinstance(one, Refused) and one.away for one in [*outcomes[:2], outcomes[7]])
        assert all(isinstance(one, Granted) and one.lease.basis is Basis.LOCAL for one in outcomes[2:7])
        assert outcomes[3].uncounted == ("q-requests_per_minute",)
        assert outcomes[6].standings[0].remaining == 0
        tally = leases.tally
        assert (tally.away_refused, tally.away_open, tally.away_local) == (3, 1, 3)
        assert tally.not_answered >= 1
        assert tally.not_answered + tally.not_asked >= len(outcomes)
        assert leases.is_away


async def test_f14_what_was_decided_without_the_store_is_told_to_it(store: Stoppable) -> None:
    limits = [
        limit(TPM, 1000, away=Away.LOCAL, local=500),
        limit(CONCURRENT, 10, away=Away.LOCAL, local=5),
        limit(MONTHLY, 9_000, away=Away.OPEN),
    ]
    async with a_gateway(store.url) as leases:
        cold = await ask(leases, limits, "first", Use(input=100))
        assert isinstance(cold, Cold)
        await leases.hydrate(TENANT, cold.counters[0], 1_000, complete_until=cold.now)
        first = await ask(leases, limits, "first", Use(input=100))
        store.stop()
        ended, going = [await ask(leases, limits, name, Use(input=200)) for name in ("ended", "going")]
        assert isinstance(await ask(leases, limits, "refused", Use(input=200)), Refused)
        for granted, units in ((first, 60), (ended, 150)):
            settled = await leases.settle(granted.lease, Use(input=units))
            assert settled == Settled(deferred=True)
        store.go_on()
        await heal(leases)
        assert await used(leases, limits) == [60 + 150 + 200, 1, 1_000 + 60 + 150 + 200]
        assert await leases.settle(going.lease, Use(input=20)) == Settled()
        assert await used(leases, limits) == [60 + 150 + 20, 0, 1_000 + 60 + 150 + 20]


async def test_f14_a_store_that_was_killed_comes_back_with_its_data(store: Stoppable) -> None:
    limits = [limit(CONCURRENT, 2), limit(MONTHLY, 1000)]
    async with a_gateway(store.url) as leases:
        cold = await ask(leases, limits, "one", Use(input=100))
        assert isinstance(cold, Cold)
        await leases.hydrate(TENANT, cold.counters[0], 500, complete_until=cold.now)
        one = await ask(leases, limits, "one", Use(input=100))
        async with Redis.from_url(store.url) as operator:
            await operator.config_set("appendfsync", "always")
        store.kill()
        assert isinstance(await ask(leases, limits, "two", Use(input=100)), Refused)
        store.server.start()
        await heal(leases)
        assert await used(leases, limits) == [1, 600]
        two, three = [await ask(leases, limits, name, Use(input=100)) for name in ("two", "three")]
        assert isinstance(two, Granted | Ended)
        await leases.settle(one.lease, Use(input=10))
        assert (await used(leases, limits))[1] <= 710
        assert not isinstance(three, Cold)


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


async def test_f12_after_10000_random_cancels_nothing_is_in_flight(valkey: str, redis: Redis) -> None:
    rng = random.Random(12)
    limits = [limit(TPM, 1 << 40), limit(CONCURRENT, 1 << 20), limit(RPM, 1 << 40)]
    ends: Counter[str] = Counter()
    async with a_gateway(valkey, deadline_s=30.0) as leases:

        async def serve(lease_id: str) -> None:
            outcome = await ask(leases, limits, lease_id, Use(input=5))
            assert isinstance(outcome, Granted)
            try:
                await leases.extend(outcome.lease, outcome.lease.charges[:1])
                await asyncio.sleep(rng.random() * 0.002)
            finally:
                await leases.release(outcome.lease)

        async def cancel(lease_id: str) -> None:
            task = asyncio.create_task(serve(lease_id))
            for _ in range(rng.choice([1, 1, 2])):
                if rng.random() < 0.5:
                    for _ in range(rng.randrange(12)):
                        await asyncio.sleep(0)
                else:
                    await asyncio.sleep(rng.random() * 0.02)
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            ends["cancelled" if task.cancelled() else "done"] += 1

        for batch in range(250):
            await asyncio.gather(*(cancel(f"{batch}-{n}") for n in range(40)))
        assert ends.total() == 10_000
        assert ends["cancelled"] > 2_000
        await heal(leases)
        assert leases.in_flight == 0
        assert leases.dropped == 0
        assert await used(leases, limits) == [0, 0, 0]


async def test_f12_a_fenced_or_forgotten_lease_says_so(redis: Redis) -> None:
    world = await World(redis).start()
    lease = (await world.granted([limit(RPM, 5)], Use(), ttl_s=5)).lease
    await world.advance(86_400 + 6)
    await world.granted([limit(RPM, 5)], Use())
    assert await world.gateway().extend(lease) == Ended(why=Ending.EXPIRED)
    assert await world.leases.settle(lease, NOTHING) == Ended(why=Ending.EXPIRED)


@pytest.mark.parametrize("kind", [RPM, CONCURRENT, MONTHLY])
@pytest.mark.parametrize("away", [Away.LOCAL, Away.OPEN, Away.CLOSED])
async def test_f14_outages_never_overspend_more_than_the_published_bound(
    store: Stoppable, kind: Any, away: Away
) -> None:
    """Three gateways, a limit of 40, a store that stops and goes on; their clocks are simulated."""
    rng = random.Random(f"{kind}{away}")
    limits = [limit(kind, 40, away=away, local=6)]
    redis = create_redis(Secret(store.url))
    world = await World(redis).start()
    options = {"deadline_s": 0.05, "monotonic": lambda: world.now, "ttl_s": 600.0}
    gateways = [world.gateway(**options) for _ in range(3)]
    if kind is MONTHLY:
        await world.hydrate(limits)
    admitted: list[float] = []
    held: list[tuple[Leases, Lease]] = []
    outage_s, outages, peak = 0.0, 0, 0
    for step in range(150):
        if step in {30, 90, 110}:
            store.stop()
            outages += 1
        if step in {70, 100, 130}:
            store.go_on()
        world.now_us += 500_000
        outage_s += 0.5 * store.stopped
        if not store.stopped:
            await world.advance(0)
        for gateway in gateways:
            outcome = await gateway.acquire(TENANT, f"{step}-{id(gateway)}", world.charges(limits, Use(input=1)))
            if isinstance(outcome, Granted):
                admitted.append(world.now)
                held.append((gateway, outcome.lease))
        if kind is CONCURRENT and rng.random() < 0.3 and held:
            gateway, lease = held.pop(rng.randrange(len(held)))
            await gateway.settle(lease, Use())
        peak = max(peak, len(held))
        bound = overspend_bound(limits[0], gateways=3, outage_s=outage_s, outages=outages, units_per_s=2.0)
        assert bound is not None
        if kind is CONCURRENT:
            assert len(held) <= 40 + bound
        else:
            window_s = 60 if kind is RPM else 1e9
            assert sum(at > world.now - window_s for at in admitted) <= 40 + bound
    if away is not Away.CLOSED:
        assert peak > 40, "the outage was not felt"
    for gateway in gateways:
        await gateway.close()
    await redis.aclose()
