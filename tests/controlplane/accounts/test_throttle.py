"""Login throttling on real Redis, and without it."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from controlplane.accounts.throttle import ACCOUNT, ADDRESS, PAIR, LocalWindows, LoginThrottle
from controlplane.errors import RateLimitedError


async def passed(throttle: LoginThrottle, attempts: list[tuple[str, str]]) -> int:
    answers = await asyncio.gather(*(throttle.attempt(*attempt) for attempt in attempts), return_exceptions=True)
    assert all(answer is None or isinstance(answer, RateLimitedError) for answer in answers)
    return sum(answer is None for answer in answers)


async def test_f2_concurrent_guesses_cannot_slip_past(redis: Redis) -> None:
    throttles = [LoginThrottle(redis), LoginThrottle(redis)]
    counts = await asyncio.gather(*(passed(t, [("a@b.c", "10.0.0.1")] * 20) for t in throttles))
    assert sum(counts) == PAIR.attempts


async def test_an_account_is_protected_from_many_addresses_and_an_address_over_many_accounts(redis: Redis) -> None:
    throttle = LoginThrottle(redis)
    spread = [("a@b.c", f"10.0.0.{n}") for n in range(ACCOUNT.attempts + 10)]
    assert await passed(throttle, spread) == ACCOUNT.attempts
    sprayed = [(f"user{n}@b.c", "10.9.9.9") for n in range(ADDRESS.attempts + 10)]
    assert await passed(throttle, sprayed) == ADDRESS.attempts
    assert await passed(throttle, [("other@b.c", "10.8.8.8")]) == 1


async def test_a_right_password_clears_the_pair_only(redis: Redis) -> None:
    throttle = LoginThrottle(redis)
    assert await passed(throttle, [("a@b.c", "10.0.0.1")] * PAIR.attempts) == PAIR.attempts
    await throttle.succeeded("a@b.c", "10.0.0.1")
    assert await passed(throttle, [("a@b.c", "10.0.0.1")]) == 1
    counts = await redis.mget(await redis.keys("tidegate:{login}:*"))
    assert sorted(int(count or 0) for count in counts) == [1, PAIR.attempts + 1, PAIR.attempts + 1]


async def test_f11_the_refusal_says_how_long_and_every_window_ends(redis: Redis) -> None:
    throttle = LoginThrottle(redis)
    await passed(throttle, [("a@b.c", "10.0.0.1")] * PAIR.attempts)
    with pytest.raises(RateLimitedError) as caught:
        await throttle.attempt("a@b.c", "10.0.0.1")
    assert 0 < int(caught.value.headers["retry-after"]) <= PAIR.window_s
    for key in await redis.keys("tidegate:{login}:*"):
        assert 0 < await redis.ttl(key) <= ACCOUNT.window_s


async def test_neither_email_nor_address_is_stored_as_text(redis: Redis) -> None:
    await LoginThrottle(redis).attempt("someone@example.com", "10.0.0.1")
    names = str(await redis.keys("*"))
    assert "someone" not in names
    assert "10.0.0.1" not in names


async def test_f14_without_redis_guessing_stays_bounded_and_the_owner_gets_in() -> None:
    away: Redis = Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.5)
    throttle = LoginThrottle(away)
    assert await passed(throttle, [("a@b.c", "10.0.0.1")] * 20) == PAIR.attempts
    assert await passed(throttle, [("owner@b.c", "10.0.0.2")]) == 1
    await throttle.succeeded("a@b.c", "10.0.0.1")
    assert await passed(throttle, [("a@b.c", "10.0.0.1")]) == 1
    await away.aclose()


def test_f11_waiting_exactly_that_long_passes() -> None:
    now = 100.0
    windows = LocalWindows(lambda: now)
    for _ in range(PAIR.attempts):
        assert windows.take({"k": PAIR}) == 0
    wait = windows.take({"k": PAIR})
    assert wait > 0
    now += wait - 1e-6
    assert windows.take({"k": PAIR}) > 0
    now += 1e-6
    assert windows.take({"k": PAIR}) == 0


def test_the_local_windows_stay_bounded() -> None:
    windows = LocalWindows(lambda: 0.0)
    for n in range(LocalWindows.MOST + 500):
        windows.take({f"k{n}": PAIR})
    assert len(windows._windows) == LocalWindows.MOST
