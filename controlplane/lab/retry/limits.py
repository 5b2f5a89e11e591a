"""Replay of requests against limits in a real store whose clock the replay moves: who is refused waits as told.

Layer: service. The scripts are those that gateways run, but for the clock; the wait is read from the answer that a
client would get. For windows a limit's owner is one client, which sends nothing while it waits; what it has in flight
ends and settles meanwhile. For concurrency everybody goes on, since nobody can know when others end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random

from redis.asyncio import Redis

from controlplane.admission import scripts
from controlplane.admission.answers import Acquired, Cold, Granted, Lease, OutsideWindows, Refused
from controlplane.admission.charges import COUNTERS, Counter, Use, Windows, charges_for
from controlplane.admission.leases import Leases
from controlplane.gateway.refusals import refused
from controlplane.quotas import windows
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel

TENANT = "replay"
CLOCK = "tidegate-replay-clock"
SIMULATED = f"local function server_time() return tonumber(redis.call('GET', '{CLOCK}')) end\n"
ZONE = "Europe/Berlin"
MICRO = 1_000_000
MOST_TRIES = 20
LOOKS = 4
"""Windows that may turn, or be cold, between two tries."""


def start() -> float:
    """Where the clock begins: the evening of next year's 26 October, shortly before summer time ends there and a month
    does. Not in the past, because the store lets counters of past windows expire by its own clock.
    """
    return datetime(datetime.now(UTC).year + 1, 10, 26, 18, tzinfo=UTC).timestamp()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: seconds after the one before, its tokens and the seconds it takes."""

    gap: float
    prompt: int
    output: int
    stay: float


@dataclass(slots=True)
class Waits:
    """Refusals by a kind of counter, those of them that passed once they had waited, and how long that was in all."""

    requests: int = 0
    refusals: int = 0
    passed: int = 0
    waited_s: float = 0.0

    @property
    def share(self) -> float | None:
        return self.passed / self.refusals if self.refusals else None


def limit(kind: QuotaKind, hard: int) -> Limit:
    """A tenant's limit for any model."""
    return Limit(quota_id=f"q-{kind.value}", level=QuotaLevel.TENANT, scope_id=TENANT, model="", kind=kind, hard=hard)


class Store:
    """Leases on `redis`, which it empties, at a time of its own."""

    def __init__(self, redis: Redis, limits: list[Limit]) -> None:
        self._redis = redis
        self._limits = limits
        self._numbers = itertools.count()
        self._in_flight: list[tuple[float, int, Lease, Use]] = []
        self._micros = round(start() * MICRO)
        self.refused_by = limits[0].kind
        self._leases = Leases(
            redis, lua=scripts.register(redis, SIMULATED), deadline_s=30.0, ttl_s=3600.0, wall=lambda: self.now
        )

    @property
    def now(self) -> float:
        return self._micros / MICRO

    async def open(self) -> None:
        await self._redis.flushdb()
        await self._redis.set(CLOCK, self._micros)

    async def turn_to(self, at: float) -> None:
        """Move the clock to `at`, settling on the way what ends until then."""
        while self._in_flight and self._in_flight[0][0] <= at:
            ends, _, lease, use = heapq.heappop(self._in_flight)
            await self._move(ends)
            await self._leases.settle(lease, use)
        await self._move(at)

    async def enter(self, ask: Ask) -> float | None:
        """None when the request was let in, else the seconds of its Retry-After. Raises RuntimeError for a refusal
        without one.
        """
        worst = Use(input=ask.prompt, uncached_input=ask.prompt, output=2 * ask.output)
        outcome = await self._acquire(worst)
        if isinstance(outcome, Granted):
            used = Use(input=ask.prompt, uncached_input=ask.prompt, output=ask.output)
            heapq.heappush(self._in_flight, (self.now + ask.stay, next(self._numbers), outcome.lease, used))
            return None
        if not isinstance(outcome, Refused):
            raise RuntimeError(f"the store answered {type(outcome).__name__}")  # noqa: TRY004 - an answer, not a type
        headers = refused(outcome).headers or {}
        self.refused_by = outcome.refusals[0].kind
        if "retry-after" not in headers:
            raise RuntimeError(f"a request of {ask} can never pass {self.refused_by.value}")
        return float(headers["retry-after"])

    async def close(self) -> None:
        await self._leases.close()

    async def _acquire(self, worst: Use) -> Acquired:
        for _ in range(LOOKS):
            charges = charges_for(TENANT, self._limits, worst, self._windows())
            outcome = await self._leases.acquire(TENANT, f"lease-{next(self._numbers)}", charges)
            if isinstance(outcome, Cold):
                for counter in outcome.counters:
                    await self._leases.hydrate(TENANT, counter, 0, complete_until=self.now)
            elif not isinstance(outcome, OutsideWindows):
                return outcome
        raise RuntimeError("the store does not come to know its windows")

    def _windows(self) -> Windows:
        day, month = windows.day(ZONE, self.now), windows.month(ZONE, self.now)
        return Windows(day=(day.start, day.end, day.next_end), month=(month.start, month.end, month.next_end))

    async def _move(self, at: float) -> None:
        self._micros = max(self._micros, round(at * MICRO))
        await self._redis.set(CLOCK, self._micros)


async def one_owner(redis: Redis, limits: list[Limit], asks: Iterable[Ask]) -> dict[Counter, Waits]:
    """Play `asks` one after another; a refused one waits and asks again, and all that come after it wait as well."""
    store = Store(redis, limits)
    await store.open()
    found = {COUNTERS[each.kind]: Waits() for each in limits}
    for ask in asks:
        await store.turn_to(store.now + ask.gap)
        for waits in found.values():
            waits.requests += 1
        for _ in range(MOST_TRIES):
            wait = await store.enter(ask)
            if wait is None:
                break
            waits = found[COUNTERS[store.refused_by]]
            waits.refusals += 1
            waits.waited_s += wait
            await store.turn_to(store.now + wait)
            if await store.enter(ask) is None:
                waits.passed += 1
                break
    await store.close()
    return found


async def many_at_once(redis: Redis, limits: list[Limit], asks: Iterable[Ask]) -> Waits:
    """Play `asks` at their times; a refused one comes back after its wait while all the others go on."""
    store = Store(redis, limits)
    await store.open()
    waits = Waits()
    coming, at = [], store.now
    for number, ask in enumerate(asks):
        at += ask.gap
        coming.append((at, number, 0, ask))
    waits.requests = len(coming)
    heapq.heapify(coming)
    while coming:
        at, number, tries, ask = heapq.heappop(coming)
        await store.turn_to(at)
        wait = await store.enter(ask)
        if wait is None:
            waits.passed += bool(tries)
        elif tries < MOST_TRIES:
            waits.refusals += 1
            waits.waited_s += wait
            heapq.heappush(coming, (at + wait, number, tries + 1, ask))
    await store.close()
    return waits


def random_asks(rng: Random, count: int, per_s: float) -> Iterator[Ask]:
    """Poisson arrivals; log-normal lengths around 300 and 120 tokens, stays of 10 ms a token of output."""
    for _ in range(count):
        output = 1 + min(2000, int(rng.lognormvariate(4.4, 0.9)))
        prompt = 1 + min(6000, int(rng.lognormvariate(5.3, 0.9)))
        yield Ask(rng.expovariate(per_s), prompt, output, 0.05 + 0.01 * output)
