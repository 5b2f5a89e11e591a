"""From a gateway's spool to the ledger by way of a Redis stream: names, entries, and the shipper.

Layer: service. The stream is transport, never storage: nothing is trimmed by length, and the spool keeps every record
until the consumer has said that Postgres holds it. An entry that is gone from the stream without that word was lost
with Redis and is sent again; a record sent twice is stored once. A shipper has at most `WINDOW` records under way, so
the stream is bounded by the number of gateways however long Postgres is away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable
from typing import NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from controlplane.ledger.spool import BEGINNING, Position, Spool

log = logging.getLogger("tidegate.ledger")

STREAM = "tidegate:{usage}:stream"
GROUP = "ledger"
STORED_TTL_S = 3600
"""A gateway that has not asked for its acknowledgements for this long sends again."""

RECORD, SENDER, NUMBER = b"r", b"s", b"n"
"""Fields of an entry: the record (msgpack), whom to tell that it is stored, and by which number."""

SHIP = """
local ids = {}
for i = 3, #ARGV do
  local number = string.format('%d', ARGV[2] + i - 3)
  ids[#ids + 1] = redis.call('XADD', KEYS[1], '*', 'r', ARGV[i], 's', ARGV[1], 'n', number)
end
return ids
"""
"""Adds records {sender, first number, record …} by one command, which costs the gateway less than one for each."""

WINDOW = 4_000
SHIPMENT = 250
"""Records sent in one round trip at most."""
WAIT_S = 2.0
"""Longest wait for an acknowledgement before looking whether what was sent is still there."""
LONGEST_PAUSE_S = 15.0


def stored_key(sender: str) -> str:
    """The list of numbers that are in the ledger, of one sender's one session."""
    return f"tidegate:{{usage}}:stored:{sender}"


class Pauses:
    """Growing, jittered pauses between attempts at a store that is away; `reset` after a success."""

    def __init__(self, longest_s: float = LONGEST_PAUSE_S) -> None:
        self._longest_s = longest_s
        self._attempts = 0

    def reset(self) -> None:
        self._attempts = 0

    async def pause(self) -> None:
        length = min(self._longest_s, 0.25 * 2.0 ** min(self._attempts, 16))
        self._attempts += 1
        await asyncio.sleep(length * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret


class _LostError(Exception):
    """Redis has neither what was sent nor word that it was stored."""


class _Sent(NamedTuple):
    start: Position
    entry_id: bytes | None


class Shipper:
    """Sends one spool's records and gives its space back. `run` goes on until cancelled, whatever is away."""

    def __init__(self, spool: Spool, redis: Redis, *, gateway: str, window: int = WINDOW) -> None:
        self._spool = spool
        self._redis = redis
        self._ship = redis.register_script(SHIP)
        self._gateway = gateway
        self._window = window
        self._cursor = BEGINNING
        self._number = 0
        self._sent: dict[int, _Sent] = {}
        self._room = asyncio.Event()
        self._sender = ""
        self.acknowledged = 0
        """Records known to be stored."""
        self.resent = 0
        """How often records were sent again, whole windows at a time."""

    @property
    def under_way(self) -> int:
        """Records sent and not known to be stored."""
        return len(self._sent)

    @property
    def stored(self) -> Position:
        """Everything before it is in the ledger."""
        return next(iter(self._sent.values())).start if self._sent else self._cursor

    async def run(self) -> None:
        pauses = Pauses()
        while True:
            self._begin()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send(pauses))
                    tasks.create_task(self._settle())
            except* _LostError:
                log.warning("usage records were lost with Redis and are sent again")
            except* (RedisError, OSError, TimeoutError) as errors:
                log.warning("usage records wait in the spool: %s", type(errors.exceptions[0]).__name__)
                await pauses.pause()

    def _begin(self) -> None:
        """A new session: what is not known to be stored is sent again, under another name."""
        self._cursor = self.stored
        self.resent += bool(self._sent)
        self._sent.clear()
        self._sender = f"{self._gateway}:{secrets.token_hex(8)}"
        self._room.set()

    async def _send(self, pauses: Pauses) -> None:
        while True:
            await self._room.wait()
            await self._spool.beyond(self._cursor)
            room = self._window - len(self._sent)
            batch = await self._spool.read(self._cursor, min(SHIPMENT, room))
            numbers = range(self._number, self._number + len(batch.entries))
            self._number = numbers.stop
            self._sent.update(
                (number, _Sent(entry.start, None)) for number, entry in zip(numbers, batch.entries, strict=True)
            )
            self._cursor = batch.cursor
            if len(self._sent) >= self._window:
                self._room.clear()
            payloads = [entry.payload for entry in batch.entries]
            sent: list[bytes | str | int] = [self._sender, numbers.start, *payloads]
            entry_ids: list[bytes] = await self._ship(keys=[STREAM], args=sent) if payloads else []
            for number, entry_id in zip(numbers, entry_ids, strict=True):
                if number in self._sent:
                    self._sent[number] = self._sent[number]._replace(entry_id=entry_id)
            pauses.reset()

    async def _settle(self) -> None:
        key = stored_key(self._sender)
        while True:
            first = await cast(Awaitable[list[bytes] | None], self._redis.blpop([key], timeout=WAIT_S))
            if first is None:
                await self._require_presence(key)
            else:
                self._take([first[1], *await self._more(key)])

    async def _more(self, key: str) -> list[bytes]:
        return await cast(Awaitable[list[bytes] | None], self._redis.lpop(key, self._window)) or []

    async def _require_presence(self, key: str) -> None:
        """Raises _LostError when the oldest record under way is neither in the stream nor acknowledged."""
        number, oldest = next(iter(self._sent.items()), (0, None))
        if oldest is None or oldest.entry_id is None:
            return
        if await self._redis.xrange(STREAM, oldest.entry_id, oldest.entry_id):
            return
        self._take(await self._more(key))  # it may have been stored between the two looks
        if number in self._sent:
            raise _LostError

    def _take(self, numbers: list[bytes]) -> None:
        for number in numbers:
            self.acknowledged += self._sent.pop(int(number), None) is not None
        self._spool.trim(self.stored)
        if len(self._sent) < self._window:
            self._room.set()
