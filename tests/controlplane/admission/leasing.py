"""Leases under a simulated clock, and limits to take them on."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from redis.asyncio import Redis

from controlplane.admission import scripts
from controlplane.admission.answers import Acquired, ColdCounter, Granted, Refused
from controlplane.admission.charges import Charge, Use, Windows, charges_for
from controlplane.admission.leases import Leases
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel

TENANT = "5f0c1f7e"
DAY_S = 86_400
SIMULATED = "local function server_time() return tonumber(redis.call('GET', 'clock')) end\n"
RPM, TPM, OUT = (
    QuotaKind.REQUESTS_PER_MINUTE,
    QuotaKind.TOKENS_PER_MINUTE,
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE,
)
CONCURRENT, DAILY, MONTHLY, MONEY = (
    QuotaKind.CONCURRENT_REQUESTS,
    QuotaKind.TOKENS_PER_DAY,
    QuotaKind.TOKENS_PER_MONTH,
    QuotaKind.MONEY_PER_MONTH,
)


async def heal(leases: Leases) -> None:
    """Go on until the store answers again, and what it was not told is told."""
    async with asyncio.timeout(60):
        while leases.is_away or leases.deferred or leases._errands:
            await leases.beat()
            await asyncio.sleep(0.02)


def tokens(input: int = 0, output: int = 0) -> Use:
    return Use(input=input, uncached_input=input, output=output)


def limit(kind: QuotaKind, hard: int | None, **changes: Any) -> Limit:
    values: dict[str, Any] = {
        "quota_id": f"q-{kind.value}",
        "level": QuotaLevel.TENANT,
        "scope_id": TENANT,
        "model": "",
        "kind": kind,
        "hard": hard,
    }
    return Limit(**{**values, **changes})


def windows_at(now: float) -> Windows:
    """Days and 30-day months of UTC; good enough to count in."""
    day, month = int(now // DAY_S) * DAY_S, int(now // (30 * DAY_S)) * 30 * DAY_S
    return Windows(day=(day, day + DAY_S, day + 2 * DAY_S), month=(month, month + 30 * DAY_S, month + 60 * DAY_S))


class SlowLedger:
    """Sums that take a moment; `most` is how many were under way at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._summing = 0
        self.most = 0

    async def __call__(self, _: ColdCounter) -> tuple[int, float]:
        self._summing += 1
        self.most = max(self.most, self._summing)
        await asyncio.sleep(0.02)
        self._summing -= 1
        return 0, self._world.now


class World:
    """Leases of one tenant whose server's clock a test moves, in whole microseconds."""

    def __init__(self, redis: Redis, **options: Any) -> None:
        self.redis = redis
        self.now_us = int(time.time() // DAY_S * DAY_S + DAY_S // 2) * 1_000_000
        self.ids = itertools.count()
        self.leases = self.gateway(**options)

    @property
    def now(self) -> float:
        return self.now_us / 1e6

    def gateway(self, **options: Any) -> Leases:
        """One more process's leases. The deadline is wide: what is tested here is not how fast this machine is."""
        lua = scripts.register(self.redis, SIMULATED)
        return Leases(self.redis, lua=lua, **{"deadline_s": 10.0, "wall": lambda: self.now, **options})

    async def start(self) -> World:
        await self.advance(0)
        return self

    async def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)
        await self.redis.set("clock", self.now_us)

    def charges(self, limits: list[Limit], use: Use) -> tuple[Charge, ...]:
        return charges_for(TENANT, limits, use, windows_at(self.now))

    async def acquire(self, limits: list[Limit], use: Use, lease_id: str | None = None, **options: Any) -> Acquired:
        lease_id = lease_id or f"lease-{next(self.ids)}"
        return await self.leases.acquire(TENANT, lease_id, self.charges(limits, use), **options)

    async def granted(self, limits: list[Limit], use: Use, lease_id: str | None = None, **options: Any) -> Granted:
        outcome = await self.acquire(limits, use, lease_id, **options)
        assert isinstance(outcome, Granted), outcome
        return outcome

    async def refused(self, limits: list[Limit], use: Use, lease_id: str | None = None) -> Refused:
        outcome = await self.acquire(limits, use, lease_id)
        assert isinstance(outcome, Refused), outcome
        return outcome

    async def hydrate(self, limits: list[Limit], base: int = 0) -> None:
        """Give every cold counter of `limits` the same base."""
        from controlplane.admission.answers import Cold

        found = await self.leases.standings(TENANT, self.charges(limits, Use()))
        assert isinstance(found, Cold), found
        for counter in found.counters:
            assert await self.leases.hydrate(TENANT, counter, base, complete_until=self.now) is True

    async def used(self, *limits: Limit) -> list[int]:
        """What the counters of `limits` hold."""
        found = await self.leases.standings(TENANT, self.charges(list(limits), Use()))
        assert isinstance(found, tuple), found
        return [one.used for one in found]
