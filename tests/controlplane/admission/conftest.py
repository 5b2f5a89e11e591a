"""What tests of admission share."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.controlplane.admission.leasing import World


@pytest.fixture
async def world(redis: Redis) -> World:
    """Leases on a real store under a simulated clock."""
    return await World(redis).start()
