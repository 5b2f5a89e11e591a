"""Pages over HTTP: one control plane for the tests of a file, and who looks at it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.conftest import make_settings
from tests.controlplane.clients import Deployment, deployment, log_in
from tests.services import Databases


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    postgres: Databases, migrated_template: str, valkey: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    """One control plane for a file, whose tests run in the module's loop; a test changes only what it made itself."""
    url = postgres.create("pages", template=migrated_template)
    home = tmp_path_factory.mktemp("home")
    async with deployment(make_settings(home, database_url=url, redis_url=valkey)) as running:
        yield running
    postgres.drop(url)


@pytest_asyncio.fixture(loop_scope="module")
async def deployed(shared: Deployment) -> Deployment:
    """Nobody is logged in, and no earlier test's tries count."""
    shared.client.cookies.clear()
    await shared.app.state.resources.redis.flushdb()
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def operator(deployed: Deployment) -> Deployment:
    await log_in(deployed, deployed.operator_email)
    return deployed


@pytest_asyncio.fixture(loop_scope="module")
async def viewer(deployed: Deployment) -> Deployment:
    await log_in(deployed, deployed.viewer_email)
    return deployed
