"""Fixtures shared by all tests: real Postgres and Valkey once a run, started only when a test asks for them.

`session` rolls back after each test; what must commit uses `committed_database` (its own copy of the migrated
database) or `settings`, whose URLs point at one. `rng` is seeded per test.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from controlplane.db import driver_url
from controlplane.settings import Secret, Settings

# A test asserts no absolute time, and neither does hypothesis.
hypothesis.settings.register_profile("tidegate", deadline=None)
hypothesis.settings.load_profile("tidegate")

if TYPE_CHECKING:
    from tests.services import Databases


def make_settings(home: Path, *, database_url: str, redis_url: str, **overrides: object) -> Settings:
    """Settings for one test's processes: all files under `home`, known secrets."""
    values: dict[str, object] = {
        "database_url": Secret(database_url),
        "redis_url": Secret(redis_url),
        "home": home,
        "internal_token": Secret("internal-token-of-the-tests"),
        "session_secret": Secret("session-secret-of-the-tests-0123456789"),
    }
    return Settings(**{**values, **overrides})  # type: ignore[arg-type]  # the overrides are the test's own


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness that is the same for the same test."""
    return random.Random(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """A Postgres server that can make databases: embedded, or the one of DATABASE_URL."""
    from tests.services import postgres_server

    with postgres_server(os.environ.get("DATABASE_URL")) as databases:
        yield databases


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """A Valkey or Redis URL: embedded, or REDIS_URL."""
    from tests.services import valkey_server

    with valkey_server(os.environ.get("REDIS_URL")) as url:
        yield url


@pytest.fixture(scope="session")
def migrated_template(postgres: Databases) -> str:
    """A migrated database nobody connects to; others are copied from it."""
    from controlplane.migrate import upgrade

    url = postgres.create("template")
    upgrade(Secret(url))
    return url


@pytest.fixture(scope="session")
def database_url(postgres: Databases, migrated_template: str) -> str:
    """The migrated database of tests that roll back."""
    return postgres.create("shared", template=migrated_template)


@pytest.fixture(scope="session")
def _own_database(postgres: Databases, migrated_template: str) -> str:
    from tests.services import SEEDED, tables_with_rows

    url = postgres.create("own", template=migrated_template)
    assert tables_with_rows(url) == SEEDED, "a migration seeds rows that tests.services does not restore"
    return url


@pytest.fixture
def committed_database(postgres: Databases, _own_database: str) -> str:
    """A migrated database of this test's own while it runs, as fresh as a new one."""
    postgres.empty(_own_database)
    return _own_database


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An engine on the shared database; commit nothing through it."""
    engine = create_async_engine(driver_url(database_url, "asyncpg"), poolclass=NullPool)
    yield engine
    await engine.dispose()


@pytest.fixture
async def committed_engine(committed_database: str) -> AsyncIterator[AsyncEngine]:
    """An engine on this test's own database."""
    engine = create_async_engine(driver_url(committed_database, "asyncpg"), poolclass=NullPool)
    yield engine
    await engine.dispose()


@pytest.fixture
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """A session whose work is rolled back after the test, even what a savepoint released."""
    async with engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncSession(
            connection, expire_on_commit=False, join_transaction_mode="create_savepoint"
        ) as session:
            yield session
        await outer.rollback()


@pytest.fixture
async def redis(valkey: str) -> AsyncIterator[Redis]:
    """A client on an empty Redis."""
    client = Redis.from_url(valkey)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
def settings(committed_database: str, valkey: str, redis: Redis, tmp_path: Path) -> Settings:
    """Settings of one test's own deployment: own database, flushed Redis, files under the test's folder."""
    return make_settings(tmp_path / "home", database_url=committed_database, redis_url=valkey)


@pytest.fixture
def offline_settings(tmp_path: Path) -> Settings:
    """Settings whose Postgres and Redis do not exist: nothing listens on those ports."""
    return make_settings(
        tmp_path / "home",
        database_url="postgresql://nobody:nothing@127.0.0.1:1/none",
        redis_url="redis://127.0.0.1:1/0",
    )
