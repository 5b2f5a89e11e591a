"""What tests of the way from spool to ledger share: records, working ends, and where things have come to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.ledger.consumer import StreamConsumer
from controlplane.ledger.spool import BEGINNING, Position, Spool
from controlplane.ledger.stream import Shipper
from dataplane.protocol import UsageBasis, UsageRecord, encode
from tests.controlplane.telemetry.reports import usage

NOW = 1_700_000_005.0
PATIENCE_S = 120


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


async def everything(spool: Spool, cursor: Position = BEGINNING, most: int = 100) -> tuple[list[bytes], Position]:
    """All payloads from `cursor` on, and where they end."""
    found: list[bytes] = []
    while True:
        batch = await spool.read(cursor, most)
        found += [entry.payload for entry in batch.entries]
        if batch.cursor == cursor:
            return found, cursor
        cursor = batch.cursor


def payloads(rng: random.Random, number: int, largest: int = 300) -> list[bytes]:
    return [n.to_bytes(4, "big") + rng.randbytes(rng.randint(0, largest)) for n in range(number)]


def records(number: int, start: int = 0) -> list[UsageRecord]:
    return [
        usage(f"s{n}", output_tokens=n % 7, basis=UsageBasis.COUNTED, tenant=f"t{n % 3}")
        for n in range(start, start + number)
    ]


def tokens(number: int) -> int:
    return sum(n % 7 for n in range(number))


async def equals(found: Awaitable[int], wanted: int) -> bool:
    return await found == wanted
