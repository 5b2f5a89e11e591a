"""Spool → stream → ledger: everything arrives once, whatever dies on the way."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from controlplane.db import driver_url, transaction
from controlplane.ledger.consumer import StreamConsumer
from controlplane.ledger.spool import Spool
from controlplane.ledger.stream import GROUP, NUMBER, RECORD, SENDER, STREAM, Shipper, stored_key
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.local.valkey import EmbeddedValkey
from controlplane.migrate import upgrade
from controlplane.redis_client import create_redis
from controlplane.settings import Secret
from dataplane.protocol import UsageBasis, UsageRecord, encode
from tests.controlplane.telemetry.reports import usage
from tests.services import free_port, service_folder

CHECKOUT = Path(__file__).parents[3]
NOW = 1_700_000_005.0
PATIENCE_S = 120


@pytest.fixture
async def redis(valkey: str) -> AsyncIterator[Redis]:
    """The process's own kind of client on an empty Redis: with redis-py's a cancellation may get lost."""
    client = create_redis(Secret(valkey))
    await client.flushdb()
    yield client
    await client.aclose()


@asynccontextmanager
async def working(*work: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
        for task in tasks:
            assert not task.done(), "background work goes on whatever is away"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def consumer(engine: AsyncEngine, redis: Redis, taken_over_after_ms: int = 300, **values: object) -> StreamConsumer:
    return StreamConsumer(
        engine,
        redis,
        clock=lambda: NOW,
        taken_over_after_ms=taken_over_after_ms,
        **values,  # type: ignore[arg-type]
    )


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await met():
            await asyncio.sleep(0.02)


async def drained(spool: Spool, shipper: Shipper) -> bool:
    return shipper.under_way == 0 and shipper.stored >= spool._end()


async def ledger(engine: AsyncEngine) -> tuple[int, int]:
    """(rows, output tokens)"""
    async with transaction(engine) as session:
        query = text("SELECT count(*), coalesce(sum(output_tokens), 0) FROM usage_ledger")
        rows, tokens = (await session.execute(query)).one()
        return int(rows), int(tokens)


async def spooled(spool: Spool, records: list[UsageRecord]) -> None:
    await asyncio.gather(*(spool.append(encode(record)) for record in records))


def records(number: int, start: int = 0) -> list[UsageRecord]:
    return [
        usage(f"s{n}", output_tokens=n % 7, basis=UsageBasis.COUNTED, tenant=f"t{n % 3}")
        for n in range(start, start + number)
    ]


def tokens(number: int) -> int:
    return sum(n % 7 for n in range(number))


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
        await until(lambda: _is(redis.xlen(STREAM), 60))
        await asyncio.sleep(2.5)  # longer than the wait for an acknowledgement: what is still there is not sent again
        assert await redis.xlen(STREAM) == 60
    assert (spool.held_bytes, shipper.resent) == (held, 0)
    await spool.close()


async def _is(found: Awaitable[int], wanted: int) -> bool:
    return await found == wanted


async def test_what_redis_lost_is_sent_again(tmp_path: Path, committed_engine: AsyncEngine, redis: Redis) -> None:
    spool = Spool(tmp_path)
    shipper = Shipper(spool, redis, gateway="gateway-0", window=60)
    await spooled(spool, records(200))
    async with working(shipper.run()):
        await until(lambda: _is(redis.xlen(STREAM), 60))
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
        await until(lambda: _is(redis.xlen(STREAM), 250))
    second = Shipper(spool, redis, gateway="gateway-0")  # the gateway was killed: it knows nothing of what was sent
    one, two = consumer(committed_engine, redis), consumer(committed_engine, redis)
    async with working(second.run(), one.run(), two.run()):
        await until(lambda: drained(spool, second))
        await until(lambda: _is(redis.xlen(STREAM), 0))
    assert await ledger(committed_engine) == (600, tokens(600))
    await spool.close()


async def test_f22_what_cannot_be_billed_is_kept_aside_and_holds_nobody_up(
    tmp_path: Path, committed_engine: AsyncEngine, redis: Redis
) -> None:
    spool = Spool(tmp_path)
    refused: list[int] = []
    shipper = Shipper(spool, redis, gateway="gateway-0")
    bad = [
        b"\xc1 not a record",
        b"",
        encode(usage("negative", prompt_tokens=-1)),
        encode(usage("old", started_at=1.0, finished_at=2.0)),
        encode(usage("text", model="a\x00b")),
    ]
    for payload in bad:
        await spool.append(payload)
    await spooled(spool, records(20))
    taking = consumer(committed_engine, redis, on_refused=refused.append)
    async with working(shipper.run(), taking.run()):
        await until(lambda: drained(spool, shipper))
    assert await ledger(committed_engine) == (20, tokens(20))
    async with transaction(committed_engine) as session:
        rows = await session.execute(text("SELECT record, reason FROM usage_refused"))
        kept = {bytes(row.record): row.reason for row in rows}
    assert set(kept) == set(bad) and all(kept.values())
    assert sum(refused) == len(bad)
    await spool.close()


async def test_f22_a_record_the_database_refuses_is_found_among_the_good(
    tmp_path: Path, committed_engine: AsyncEngine, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transaction(committed_engine) as session:
        await session.execute(text("ALTER TABLE usage_ledger ADD CONSTRAINT no_s7 CHECK (attempt_id <> 's7')"))
    try:
        spool = Spool(tmp_path)
        shipper = Shipper(spool, redis, gateway="gateway-0")
        await spooled(spool, records(20))
        async with working(shipper.run(), consumer(committed_engine, redis).run()):
            await until(lambda: drained(spool, shipper))
        assert await ledger(committed_engine) == (19, tokens(20) - 0)
        async with transaction(committed_engine) as session:
            assert await session.scalar(text("SELECT reason FROM usage_refused")) == (
                "it could not be stored: IntegrityError"
            )
        await spool.close()
    finally:
        async with transaction(committed_engine) as session:
            await session.execute(text("ALTER TABLE usage_ledger DROP CONSTRAINT no_s7"))


CONSUMER = """
import asyncio, sys
from controlplane.ledger.consumer import StreamConsumer
from controlplane.redis_client import create_redis
from controlplane.settings import Secret
from sqlalchemy.ext.asyncio import create_async_engine

async def main():
    redis = create_redis(Secret(sys.argv[2]))
    stored = lambda fresh: print(len(fresh), flush=True)
    engine = create_async_engine(sys.argv[1])
    await StreamConsumer(engine, redis, clock=lambda: 1_700_000_005.0, on_stored=stored, taken_over_after_ms=300).run()

asyncio.run(main())
"""


async def test_f38_a_consumer_killed_at_any_moment_leaves_nothing_undone_and_nothing_done_twice(
    tmp_path: Path, committed_database: str, committed_engine: AsyncEngine, redis: Redis, valkey: str
) -> None:
    spool = Spool(tmp_path)
    shipper = Shipper(spool, redis, gateway="gateway-0", window=400)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    arguments = [sys.executable, "-c", CONSUMER, driver_url(committed_database, "asyncpg"), valkey]
    total = 0
    async with working(shipper.run()):
        for _ in range(3):
            await spooled(spool, records(400, total))
            total += 400
            process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE)
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)  # right after its first commit
            process.send_signal(signal.SIGKILL)
            process.communicate()
        async with working(consumer(committed_engine, redis).run()):
            await until(lambda: drained(spool, shipper))
    assert await ledger(committed_engine) == (total, tokens(total))
    assert (await redis.xpending(STREAM, GROUP))["pending"] == 0
    await spool.close()


async def test_an_acknowledgement_that_nobody_asks_for_does_not_stay_for_good(
    tmp_path: Path, committed_engine: AsyncEngine, redis: Redis
) -> None:
    await redis.xadd(STREAM, {RECORD: encode(usage("one")), SENDER: "gone", NUMBER: 1})
    async with working(consumer(committed_engine, redis).run()):
        await until(lambda: _is(redis.exists(stored_key("gone")), 1))
    assert 0 < await redis.ttl(stored_key("gone")) <= 3600


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
        await until(lambda: _is(redis.xlen(STREAM), 100))
        await redis.xgroup_create(STREAM, GROUP, id="0")
        await redis.config_set("maxmemory", 1)
        async with working(consumer(committed_engine, redis).run()):
            await until(lambda: _is(redis.xlen(STREAM), 0))
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
