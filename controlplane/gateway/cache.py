"""Policy as read from Postgres, and how long it may be believed.

Layer: service. A value is believed as long as the gateway is listening for policy changes; while it is not, one older
than `MAX_AGE_S` is read again first. When Postgres cannot answer, what is known goes on and what is not is refused with
503, never taken for absent. Every cache and every read is bounded. It must never decide what a change means.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from controlplane.errors import CapacityError
from controlplane.gateway.errors import capacity as out_of_capacity

MAX_AGE_S = 1.0
"""Longest a value is believed while nobody would tell of a change."""
READ_TIMEOUT_S = 3.0
KNOWN_WAIT_S = 0.5
"""Longest a request waits for a known value to be read again before Postgres counts as away."""
RETRY_S = 0.5
"""After a failed read, no other is tried for about this long."""
READS_AT_ONCE = 4
READS_WAITING = 256

logger = logging.getLogger("tidegate.gateway")

V = TypeVar("V")


class Ration(Protocol):
    """How many values never seen before may be looked up."""

    def spend(self) -> bool: ...

    def give_back(self) -> None: ...


class Entry(Generic[V]):
    """One value as last read; None is what Postgres says there is not. `changed` says that a change was announced
    since: it must be read before it is used.
    """

    __slots__ = ("changed", "generation", "read_at", "value")

    def __init__(self, value: V | None, read_at: float, generation: int) -> None:
        self.value = value
        self.read_at = read_at
        self.generation = generation
        self.changed = False


class PolicyCache(Generic[V]):
    """Values by key, at most `capacity` and as many that are known to be absent. `load` reads one: None when there is
    none, any exception when Postgres cannot answer. `on_learned` is called whenever a known value came or changed.

    `noun` begins sentences ("API keys"); `busy_code` refuses a read when too many wait. With `keeps_changed` a value
    whose change was announced still serves while Postgres cannot tell the new one.
    """

    def __init__(
        self,
        load: Callable[[str], Awaitable[V | None]],
        *,
        noun: str,
        busy_code: str,
        capacity: int,
        ration: Ration | None = None,
        keeps_changed: bool = False,
        on_learned: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._load = load
        self._noun = noun
        self._busy_code = busy_code
        self._ration = ration
        self._keeps_changed = keeps_changed
        self._on_learned = on_learned
        self._clock = clock
        self._known: OrderedDict[str, Entry[V]] = OrderedDict()
        self._absent: OrderedDict[str, Entry[V]] = OrderedDict()
        self._reads: dict[str, asyncio.Task[Entry[V]]] = {}
        self._dirty: set[str] = set()
        """Keys of reads in flight that were announced as changed meanwhile."""
        self._slots = asyncio.Semaphore(READS_AT_ONCE)
        self._listening = False
        self._generation = 0
        self._away_until = 0.0
        self._away = False

    async def get(self, key: str) -> V | None:
        """The value of `key`, None when there is none. Raises CapacityError (503) when nobody can tell."""
        entry = self._known.get(key) or self._absent.get(key)
        if entry is None or not self._believed(entry):
            entry = await self._read_again(key, entry)
        else:
            (self._absent if entry.value is None else self._known).move_to_end(key)
        return entry.value

    def known(self) -> list[V]:
        """Every cached value that would serve without Postgres, most recently used last."""
        return [entry.value for entry in self._known.values() if entry.value is not None and self._serves(entry)]

    def adopt(self, key: str, value: V) -> None:
        """Take the value of an earlier run: used only while Postgres cannot answer."""
        if key not in self._known:
            self._known[key] = Entry(value, self._clock(), -1)
            self._shrink()

    def on_listening(self) -> None:
        """Changes may have been missed before now: every value is read again before it is next believed."""
        self._listening = True
        self._generation += 1
        self._away_until = 0.0

    def on_silence(self) -> None:
        self._listening = False

    def invalidate(self, key: str) -> None:
        """A change of this value was announced."""
        self._absent.pop(key, None)
        if (entry := self._known.get(key)) is not None:
            entry.changed = True
            self._on_learned()
        if key in self._reads:
            self._dirty.add(key)

    def invalidate_where(self, concerns: Callable[[V], bool]) -> None:
        """A change was announced that concerns all these values, and perhaps any that is absent or being read."""
        for key, entry in self._known.items():
            if entry.value is not None and concerns(entry.value):
                self.invalidate(key)
        self._absent.clear()
        self._dirty.update(self._reads)

    async def close(self) -> None:
        reads = list(self._reads.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    def _believed(self, entry: Entry[V]) -> bool:
        if entry.changed or entry.generation != self._generation:
            return False
        return self._listening or self._clock() - entry.read_at <= MAX_AGE_S

    def _serves(self, entry: Entry[V]) -> bool:
        return self._keeps_changed or not entry.changed

    async def _read_again(self, key: str, entry: Entry[V] | None) -> Entry[V]:
        """The entry as read now, or the old one when Postgres cannot answer and it may still serve."""
        fallback = entry if entry is not None and entry.value is not None and self._serves(entry) else None
        if self._clock() < self._away_until:
            return self._without_postgres(fallback)
        read = self._reads.get(key)
        if read is None:
            if len(self._reads) >= READS_WAITING or (entry is None and self._ration and not self._ration.spend()):
                if fallback is not None:
                    return fallback
                raise out_of_capacity(f"Too many {self._noun} are being looked up; try again.", self._busy_code)
            read = asyncio.create_task(self._read(key), name=f"read {self._noun} {key}")
            self._reads[key] = read
            read.add_done_callback(lambda done: self._read_ended(key, done))
        try:
            async with asyncio.timeout(READ_TIMEOUT_S if fallback is None else KNOWN_WAIT_S):
                return await asyncio.shield(read)
        except TimeoutError:
            self._postgres_failed("no answer in time")
        except CapacityError:
            pass
        return self._without_postgres(fallback)

    def _without_postgres(self, fallback: Entry[V] | None) -> Entry[V]:
        if fallback is None:
            raise self._unavailable()
        return fallback

    def _unavailable(self) -> CapacityError:
        return out_of_capacity(f"{self._noun} cannot be looked up at the moment; try again.", "policy_unavailable")

    async def _read(self, key: str) -> Entry[V]:
        """Read one value, again if a change of it was announced while it was being read."""
        async with self._slots:
            while True:
                self._dirty.discard(key)
                generation = self._generation
                started = self._clock()
                try:
                    async with asyncio.timeout(READ_TIMEOUT_S):
                        value = await self._load(key)
                except Exception as error:
                    self._postgres_failed(type(error).__name__)
                    raise self._unavailable() from error
                if key not in self._dirty and generation == self._generation:
                    break
        if self._away:
            self._away = False
            logger.info("%s can be read again", self._noun)
        return self._store(key, Entry(value, started, generation))

    def _read_ended(self, key: str, read: asyncio.Task[Entry[V]]) -> None:
        self._reads.pop(key, None)
        self._dirty.discard(key)
        if not read.cancelled():
            read.exception()  # those who wait have it; with nobody left it is not news

    def _store(self, key: str, entry: Entry[V]) -> Entry[V]:
        if entry.value is None:
            self._known.pop(key, None)
            self._absent[key] = entry
            self._absent.move_to_end(key)
        else:
            self._absent.pop(key, None)
            previous = self._known.get(key)
            self._known[key] = entry
            self._known.move_to_end(key)
            if previous is None and self._ration is not None:
                self._ration.give_back()
            if previous is None or previous.value != entry.value or previous.changed:
                self._on_learned()
        self._shrink()
        return entry

    def _shrink(self) -> None:
        for entries in (self._known, self._absent):
            while len(entries) > self.capacity:
                entries.popitem(last=False)

    def _postgres_failed(self, why: str) -> None:
        self._away_until = self._clock() + RETRY_S * random.uniform(0.8, 1.2)  # noqa: S311  # spreads retries, hides nothing
        if not self._away:
            self._away = True
            logger.warning("%s cannot be read from Postgres (%s); known ones go on", self._noun, why)
