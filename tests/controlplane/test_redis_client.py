"""The Redis client: a cancelled task ends, whenever the cancellation comes."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from controlplane.redis_client import create_redis
from controlplane.settings import Secret

ROUNDS = 150


async def ends_when_cancelled(redis: Redis, ticks: int, pause_s: float) -> bool:
    """Whether a subscriber ends after one cancellation, which comes after some ticks and a pause."""

    async def follow() -> None:
        async with redis.pubsub() as pubsub:
            await pubsub.subscribe("nothing")
            while True:
                await pubsub.get_message(timeout=30)

    task = asyncio.create_task(follow())
    for _ in range(ticks):
        await asyncio.sleep(0)
    await asyncio.sleep(pause_s)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    if not done:
        task.cancel()
        await asyncio.wait({task})
    return bool(done)


async def test_a_subscriber_always_ends_when_it_is_cancelled(valkey: str, rng: random.Random) -> None:
    for _ in range(ROUNDS):
        redis = create_redis(Secret(valkey))
        assert await ends_when_cancelled(redis, rng.randrange(30), rng.random() * 0.01)
        await redis.aclose()


async def test_a_server_that_takes_the_connection_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.redis_client.REPLY_TIMEOUT_S", 0.2)
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    redis = create_redis(Secret(f"redis://127.0.0.1:{port}/0"))
    with pytest.raises((RedisTimeoutError, RedisConnectionError)):
        async with asyncio.timeout(60):
            await redis.ping()
    await redis.aclose()
    for writer in held:
        writer.close()
    server.close()
    await server.wait_closed()
