"""Fixtures of the gateway's tests that go through the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec import structs
from redis.asyncio import Redis

from controlplane.settings import Secret, Settings
from tests.controlplane.gateway.harness import Running, route, running_gateway
from tests.controlplane.gateway.replicas import FakeReplica, fake_replica


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with fake_replica() as running:
        yield running


@pytest.fixture
async def served(offline_settings: Settings, replica: FakeReplica) -> AsyncIterator[Running]:
    async with running_gateway(offline_settings, route(replica, "r0"), models=("m", "other")) as running:
        yield running


@pytest.fixture
def own(offline_settings: Settings, redis: Redis, valkey: str) -> Settings:
    """A real Redis, and time enough to answer on a busy machine."""
    return structs.replace(offline_settings, redis_url=Secret(valkey), lease_deadline_ms=10_000)
