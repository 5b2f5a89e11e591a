"""The ledger's tests speak to Redis as its processes do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from controlplane.redis_client import create_redis
from controlplane.settings import Secret


@pytest.fixture
async def redis(valkey: str) -> AsyncIterator[Redis]:
    """The process's own kind of client on an empty Redis: with redis-py's a cancellation may get lost."""
    client = create_redis(Secret(valkey))
    await client.flushdb()
    yield client
    await client.aclose()
