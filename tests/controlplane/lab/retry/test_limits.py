"""Replays of limits: who waits exactly Retry-After passes."""

from __future__ import annotations

import random

from redis.asyncio import Redis

from controlplane.admission.charges import Counter
from controlplane.lab.retry.limits import Ask, limit, many_at_once, one_owner, random_asks
from controlplane.quotas.schemas import QuotaKind


async def test_f11_who_waits_exactly_passes_minute_and_calendar_windows(redis: Redis, rng: random.Random) -> None:
    asks = list(random_asks(rng, 150, 2.0))
    minute = [limit(QuotaKind.REQUESTS_PER_MINUTE, 40), limit(QuotaKind.TOKENS_PER_MINUTE, 30_000)]
    found = await one_owner(redis, minute, asks)
    assert found[Counter.RATE].refusals >= 5
    assert found[Counter.RATE].share == 1.0

    calendar = [limit(QuotaKind.TOKENS_PER_DAY, 20_000), limit(QuotaKind.TOKENS_PER_MONTH, 45_000)]
    found = await one_owner(redis, calendar, asks)
    assert found[Counter.CALENDAR].refusals >= 2
    assert found[Counter.CALENDAR].share == 1.0


async def test_concurrency_is_played_with_everybody_going_on(redis: Redis) -> None:
    alone = [Ask(0.1, 10, 10, 1.5), Ask(0.1, 10, 10, 1.5)]
    waits = await many_at_once(redis, [limit(QuotaKind.CONCURRENT_REQUESTS, 1)], alone)
    assert waits.requests == 2
    assert waits.refusals >= 1
    assert waits.passed == 1
