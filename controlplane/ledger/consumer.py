"""The control plane's end of the usage stream: batches into Postgres, then acknowledgements.

Layer: service. A group of consumers shares the stream; what one that died had taken, another claims. An entry leaves
the stream in the same step in which its sender is told that it is stored, and only after the commit: whichever step
fails, the entry or its record comes again, and the ledger knows the attempt. While Postgres is away a consumer keeps
what it has taken and reads no more.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.ledger import service
from controlplane.ledger.schemas import RefusedRecord
from controlplane.ledger.stream import GROUP, NUMBER, RECORD, SENDER, STORED_TTL_S, STREAM, Pauses, stored_key
from controlplane.outage import away, not_now
from controlplane.telemetry.validation import RefusedError, check_usage, check_usage_time
from dataplane.protocol import UsageRecord

log = logging.getLogger("tidegate.ledger")

BATCH = 500
BLOCK_MS = 2_000
TAKEN_OVER_AFTER_MS = 30_000
"""An entry that its consumer has not stored within this time is another's."""
TAKE_OVER_EVERY_S = 10.0
CONSUMER_KEPT_MS = 3_600_000

_decode = msgspec.msgpack.Decoder(UsageRecord).decode


class _Entry(NamedTuple):
    entry_id: bytes
    fields: dict[bytes, bytes]


class StreamConsumer:
    """One process's consumer. `run` goes on until cancelled, whatever is away."""

    def __init__(
        self,
        engine: AsyncEngine,
        redis: Redis,
        *,
        on_stored: Callable[[Sequence[UsageRecord]], None] = lambda _: None,
        on_refused: Callable[[int], None] = lambda _: None,
        on_taken: Callable[[service.Taken], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        taken_over_after_ms: int = TAKEN_OVER_AFTER_MS,
    ) -> None:
        self._engine = engine
        self._redis = redis
        self._on_stored = on_stored
        self._on_refused = on_refused
        self._on_taken = on_taken
        self._clock = clock
        self._taken_over_after_ms = taken_over_after_ms
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    async def run(self) -> None:
        pauses = Pauses()
        while True:
            try:
                await self._join()
                await self._consume(pauses)
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("the usage stream cannot be read: %s", type(error).__name__)
                await pauses.pause()

    async def _join(self) -> None:
        """Make the group from the stream's beginning if need be, and forget members long gone."""
        try:
            await self._redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        except OutOfMemoryError:  # said before it is looked whether the group exists; reading tells
            pass
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        for member in await self._redis.xinfo_consumers(STREAM, GROUP):
            if not member["pending"] and member["idle"] > CONSUMER_KEPT_MS:
                await self._redis.xgroup_delconsumer(STREAM, GROUP, member["name"])

    async def _consume(self, pauses: Pauses) -> None:
        look_at = 0.0
        while True:
            if time.monotonic() >= look_at:
                await self._take_over()
                look_at = time.monotonic() + min(TAKE_OVER_EVERY_S, self._taken_over_after_ms / 1000)
            found: Any = await self._redis.xreadgroup(GROUP, self._name, {STREAM: ">"}, count=BATCH, block=BLOCK_MS)
            pauses.reset()
            for _, entries in found:
                await self._settle([_Entry(*one) for one in entries])

    async def _take_over(self) -> None:
        """Store what consumers that died, or a failed round of this one, left; a bounded number at a time."""
        start: bytes | str = "0-0"
        while True:
            start, claimed, *_ = await self._redis.xautoclaim(
                STREAM, GROUP, self._name, self._taken_over_after_ms, start_id=start, count=BATCH
            )
            await self._settle([_Entry(*one) for one in claimed])
            if start in (b"0-0", "0-0"):
                return

    async def _settle(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        if not await self._store(entries):
            return
        try:
            await self._release(entries, telling=True)
        except ResponseError as error:
            # A full Redis takes nothing in but gives space back; the senders miss their word and send again.
            log.warning("senders were not told that %d usage records are stored: %s", len(entries), error)
            await self._release(entries, telling=False)

    async def _release(self, entries: Sequence[_Entry], *, telling: bool) -> None:
        """Take stored entries out of the stream and tell their senders, in one step."""
        pipeline = self._redis.pipeline(transaction=True)
        ids = [entry.entry_id for entry in entries]
        pipeline.xack(STREAM, GROUP, *ids)
        pipeline.xdel(STREAM, *ids)
        for sender, numbers in _by_sender(entries).items() if telling else ():
            pipeline.rpush(stored_key(sender), *numbers)
            pipeline.expire(stored_key(sender), STORED_TTL_S)
        await pipeline.execute()

    async def _store(self, entries: Sequence[_Entry]) -> bool:
        """Commit the records, as long as it takes Postgres to be there and able to. False leaves the entries for
        another time.
        """
        pauses = Pauses()
        records, refused = self._sort(entries)
        while True:
            try:
                async with transaction(self._engine) as session:
                    taken = await service.record_from_gateways(session, records)
                    kept_aside = await service.set_aside_raw(session, refused)
            except Exception as error:
                if away(error) is not None or not_now(error):
                    log.warning("%d usage records wait: %s", len(entries), _what(error))
                    await pauses.pause()
                    continue
                return await self._store_apart(entries, error)
            self._on_taken(taken)
            self._on_stored(taken.stored)
            self._on_refused(kept_aside)
            return True

    async def _store_apart(self, entries: Sequence[_Entry], error: Exception) -> bool:
        """What a batch could not be stored for is found one by one, and kept aside with the reason (F22)."""
        if len(entries) > 1:
            for entry in entries:
                await self._settle([entry])
            return False
        log.error("a usage record could not be stored", exc_info=error)
        refused = _refused(entries[0], f"it could not be stored: {type(error).__name__}")
        try:
            async with transaction(self._engine) as session:
                kept_aside = await service.set_aside_raw(session, [refused])
        except Exception:
            log.exception("a usage record could not be set aside; it stays in the stream")
            return False
        self._on_refused(kept_aside)
        return True

    def _sort(self, entries: Sequence[_Entry]) -> tuple[list[UsageRecord], list[RefusedRecord]]:
        good, refused = [], []
        for entry in entries:
            try:
                record = _decode(entry.fields.get(RECORD, b""))
                check_usage(record, record.replica)
                check_usage_time(record, self._clock())
            except (msgspec.DecodeError, RefusedError) as error:
                refused.append(_refused(entry, str(error)))
            else:
                good.append(record)
        return good, refused


def _what(error: Exception) -> str:
    """The name of the driver's own error where it has been wrapped."""
    return type(getattr(getattr(error, "orig", None), "__cause__", None) or error).__name__


def _by_sender(entries: Sequence[_Entry]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for entry in entries:
        if SENDER in entry.fields and NUMBER in entry.fields:
            found.setdefault(entry.fields[SENDER].decode(errors="replace"), []).append(entry.fields[NUMBER])
    return found


def _refused(entry: _Entry, reason: str) -> RefusedRecord:
    sender = entry.fields.get(SENDER, b"").decode(errors="replace")
    return RefusedRecord(sender=sender, packed=entry.fields.get(RECORD, b""), reason=reason)
