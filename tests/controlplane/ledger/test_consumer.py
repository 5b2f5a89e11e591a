"""The control plane's end of the stream: what it stores, keeps aside, waits for and tells."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import driver_url, transaction
from controlplane.ledger.spool import Spool
from controlplane.ledger.stream import GROUP, NUMBER, RECORD, SENDER, STREAM, Shipper, stored_key
from dataplane.protocol import encode
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
from tests.controlplane.telemetry.reports import usage

CHECKOUT = Path(__file__).parents[3]


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
    for payload in [*bad, *bad]:
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


@pytest.mark.parametrize("state", ["53100", "40P01", "57014"])
async def test_f15_what_the_database_cannot_store_for_now_is_not_kept_aside(
    tmp_path: Path, committed_engine: AsyncEngine, redis: Redis, state: str
) -> None:
    """A full disk, a deadlock, a statement that was stopped: it is no record's fault, and all of them are billed."""
    async with transaction(committed_engine) as session:
        for statement in TROUBLE.format(state=state).split(";;"):
            await session.execute(text(statement))
    spool = Spool(tmp_path)
    refused: list[int] = []
    shipper = Shipper(spool, redis, gateway="gateway-0")
    await spooled(spool, records(20))
    taking = consumer(committed_engine, redis, on_refused=refused.append)
    async with working(shipper.run(), taking.run()):
        await until(lambda: tried(committed_engine, 3))
        async with transaction(committed_engine) as session:
            await session.execute(text("DROP FUNCTION trouble() CASCADE"))
            await session.execute(text("DROP SEQUENCE tries"))
        await until(lambda: drained(spool, shipper))
    assert await ledger(committed_engine) == (20, tokens(20))
    assert sum(refused) == 0
    await spool.close()


TROUBLE = """
CREATE SEQUENCE tries;;
CREATE FUNCTION trouble() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM nextval('tries');
  RAISE EXCEPTION 'no' USING ERRCODE = '{state}';
END $$;;
CREATE TRIGGER trouble BEFORE INSERT ON usage_attempts FOR EACH ROW EXECUTE FUNCTION trouble()
"""


async def tried(engine: AsyncEngine, times: int) -> bool:
    """Something was to be stored so often; a sequence goes on whatever is rolled back."""
    async with transaction(engine) as session:
        return bool(await session.scalar(text("SELECT last_value >= :times FROM tries"), {"times": times}))


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
        await until(lambda: equals(redis.exists(stored_key("gone")), 1))
    assert 0 < await redis.ttl(stored_key("gone")) <= 3600
