"""Spool → stream → ledger: everything arrives once, whatever dies on the way."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from controlplane.db import driver_url, transaction
from controlplane.ledger.spool import Spool
from controlplane.ledger.stream import GROUP, STREAM, Shipper
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.local.valkey import EmbeddedValkey
from controlplane.migrate import upgrade
from controlplane.redis_client import create_redis
from controlplane.settings import Secret
from dataplane.protocol import UsageRecord
from tests.controlplane.ledger.streaming import (
    consumer,
    drained,
    equals,
    ledger,
    records,
    spooled,
    tokens,
    until,
    working,
)
from tests.services import free_port, service_folder


async def test_records_arrive_once_and_leave_nothing_behind(
    tmp_path: Path, committed_engine: AsyncEngine, redis: Redis
) -> None:
    spool = Spool(tmp_path)
    stored: list[UsageRecord] = []
    shipper = Shipper(spool, redis, gateway="gateway-0", window=300)
    taking = consumer(committed_engine, redis, on_stored=stored.extend)
    await spooled(spool, records(400))
    async with working(shipper.run(), taking.run()):
        await spooled(spool, records(700))  # the first 400 again
        await until(lambda: drained(spool, shipper))
    assert await ledger(committed_engine) == (700, tokens(700))
    assert sorted(one.attempt_id for one in stored) == sorted(one.attempt_id for one in records(700))
    assert await redis.xlen(STREAM) == 0
    assert (await redis.xpending(STREAM, GROUP))["pending"] == 0
    await spool.close(shipper.stored)
    assert list(tmp_path.glob("usage-*.spool")) == []
    async with transaction(committed_engine) as session:
        assert set(await session.scalars(text("SELECT basis FROM usage_ledger"))) == {"counted"}, "F7: as counted"


async def test_the_stream_is_bounded_by_the_window_while_nobody_stores(tmp_path: Path, redis: Redis) -> None:
    spool = Spool(tmp_path)
    shipper = Shipper(spool, redis, gateway="gateway-0", window=60)
    await spooled(spool, records(500))
    held = spool.held_bytes
    async with working(shipper.run()):
        await until(lambda: equals(redis.xlen(STREAM), 60))
        await asyncio.sleep(2.5)  # longer than the wait for an acknowledgement: what is still there is not sent again
        assert await redis.xlen(STREAM) == 60
    assert (spool.held_bytes, shipper.resent) == (held, 0)
    await spool.close()


async def test_what_redis_lost_is_sent_again(tmp_path: Path, committed_engine: AsyncEngine, redis: Redis) -> None:
    spool = Spool(tmp_path)
    shipper = Shipper(spool, redis, gateway="gateway-0", window=60)
    await spooled(spool, records(200))
    async with working(shipper.run()):
        await until(lambda: equals(redis.xlen(STREAM), 60))
        await redis.flushall()
        async with working(consumer(committed_engine, redis).run()):
            await until(lambda: drained(spool, shipper))
    assert shipper.resent >= 1
    assert await ledger(committed_engine) == (200, tokens(200))
    await spool.close()


async def test_f38_two_consumers_and_a_window_sent_again_bill_each_attempt_once(
    tmp_path: Path, committed_engine: AsyncEngine, redis: Redis
) -> None:
    spool = Spool(tmp_path)
    await spooled(spool, records(600))
    first = Shipper(spool, redis, gateway="gateway-0", window=250)
    async with working(first.run()):
        await until(lambda: equals(redis.xlen(STREAM), 250))
    second = Shipper(spool, redis, gateway="gateway-0")  # the gateway was killed: it knows nothing of what was sent
    one, two = consumer(committed_engine, redis), consumer(committed_engine, redis)
    async with working(second.run(), one.run(), two.run()):
        await until(lambda: drained(spool, second))
        await until(lambda: equals(redis.xlen(STREAM), 0))
    assert await ledger(committed_engine) == (600, tokens(600))
    await spool.close()


# --------------------------------------------------------------------------------------------------------------
# Stores that really go away
# --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedValkey]:
    with service_folder("valkey") as folder:
        server = EmbeddedValkey(folder / "data", free_port())
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    with service_folder("pg") as folder:
        server = EmbeddedPostgres(folder / "data", free_port())
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.mark.parametrize("keeps_its_data", [True, False])
async def test_f15_redis_killed_and_back_loses_nothing(
    tmp_path: Path, committed_engine: AsyncEngine, own_valkey: EmbeddedValkey, keeps_its_data: bool
) -> None:
    redis = create_redis(Secret(own_valkey.url))
    spool = Spool(tmp_path)
    shipper = Shipper(spool, redis, gateway="gateway-0", window=100)
    taking = consumer(committed_engine, redis)
    async with working(shipper.run(), taking.run()):
        await spooled(spool, records(150))
        assert own_valkey.child is not None
        os.kill(own_valkey.child.pid, signal.SIGKILL)
        own_valkey.stop()
        await spooled(spool, records(150, 150))
        await asyncio.sleep(1.5)
        if not keeps_its_data:
            shutil.rmtree(own_valkey.directory)
        own_valkey.start()
        await spooled(spool, records(100, 300))
        await until(lambda: drained(spool, shipper))
    assert await ledger(committed_engine) == (400, tokens(400))
    await spool.close()
    await redis.aclose()


async def test_a_full_redis_is_emptied_and_nothing_is_lost(
    tmp_path: Path, committed_engine: AsyncEngine, own_valkey: EmbeddedValkey
) -> None:
    redis = create_redis(Secret(own_valkey.url))
    spool = Spool(tmp_path)
    shipper = Shipper(spool, redis, gateway="gateway-0", window=100)
    await spooled(spool, records(250))
    async with working(shipper.run()):
        await until(lambda: equals(redis.xlen(STREAM), 100))
        await redis.xgroup_create(STREAM, GROUP, id="0")
        await redis.config_set("maxmemory", 1)
        async with working(consumer(committed_engine, redis).run()):
            await until(lambda: equals(redis.xlen(STREAM), 0))
            assert not await drained(spool, shipper), "nobody could tell the gateway"
            await redis.config_set("maxmemory", "64mb")
            await until(lambda: drained(spool, shipper))
    assert await ledger(committed_engine) == (250, tokens(250))
    await spool.close()
    await redis.aclose()


async def test_f15_postgres_stopped_loses_nothing_and_billing_goes_on(
    tmp_path: Path, own_postgres: EmbeddedPostgres, redis: Redis
) -> None:
    await asyncio.to_thread(upgrade, Secret(own_postgres.url))
    engine = create_async_engine(driver_url(own_postgres.url, "asyncpg"), pool_pre_ping=True)
    spool = Spool(tmp_path)
    shipper = Shipper(spool, redis, gateway="gateway-0", window=100)
    async with working(shipper.run(), consumer(engine, redis).run()):
        await spooled(spool, records(150))
        own_postgres.stop()
        await spooled(spool, records(250, 150))
        await asyncio.sleep(3.0)
        assert await redis.xlen(STREAM) <= 100, "the spool holds what the stream may not"
        own_postgres.start()
        await until(lambda: drained(spool, shipper))
    assert await ledger(engine) == (400, tokens(400))
    await engine.dispose()
    await spool.close()
