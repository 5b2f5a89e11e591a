"""The replica's usage records: on disk until the control plane has them.

Layer: service. Owns the journal under the replica's folder: append, group fsync, replay after a restart,
forgetting what was acknowledged. It never changes a record and never counts tokens.

Files `usage-<n>.jsonl` are segments: one JSON record a line, in order. A record is written before `add`
returns, so it outlives this process; fsync follows in groups, so a power cut can lose the last group. A
segment is deleted when all its records are acknowledged; records acknowledged but not yet deleted come again
after a restart, and the ledger drops them by attempt id. When `limit` records wait, the oldest is dropped for
each new one, and counted in `dropped`: serving does not stop for bookkeeping.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from dataplane.protocol import UsageRecord

logger = logging.getLogger(__name__)

LIMIT = 50_000
SEGMENT_BYTES = 1 << 20
RETRY_S = 1.0
"""Pause before a disk that refused a record is tried again."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageRecord).decode


class _Entry(NamedTuple):
    record: UsageRecord
    segment: int


class UsageJournal:
    """Records in the order they were made. One process owns the folder; the caller sees to that."""

    def __init__(self, folder: Path, *, limit: int = LIMIT, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the journal and replay what an earlier process left. Raises OSError when the folder is unusable."""
        self._folder = folder
        self._limit = limit
        self._segment_bytes = segment_bytes
        self._entries: dict[str, _Entry] = {}
        self._counts: dict[int, int] = {}
        self._unwritten: dict[str, UsageRecord] = {}
        self._closing: list[int] = []
        self._dirty = asyncio.Event()
        self.dropped = 0
        self.unreadable = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        last = self._replay()
        self._segment = last + 1
        self._file = self._open(self._segment)
        self._written = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def unwritten(self) -> int:
        """Records that could not be written yet: the disk is full or gone."""
        return len(self._unwritten)

    def add(self, record: UsageRecord) -> None:
        """Keep a record. A disk that refuses it is logged and tried again later; this never raises."""
        if record.attempt_id in self._entries:
            logger.error("a second usage record for attempt %s was not kept", record.attempt_id)
            return
        while len(self._entries) >= self._limit:
            self._drop_oldest()
        self._entries[record.attempt_id] = _Entry(record, self._segment)
        self._counts[self._segment] = self._counts.get(self._segment, 0) + 1
        self._unwritten[record.attempt_id] = record
        self._write()
        self._dirty.set()

    def batch(self, most: int) -> list[UsageRecord]:
        """The oldest records that wait for an acknowledgement."""
        return [entry.record for entry in islice(self._entries.values(), most)]

    def acknowledge(self, attempt_ids: Iterable[str]) -> None:
        """These are stored elsewhere. Unknown ids are ignored."""
        for attempt_id in attempt_ids:
            entry = self._entries.pop(attempt_id, None)
            if entry is not None:
                self._unwritten.pop(attempt_id, None)
                self._release(entry.segment)

    async def run(self) -> None:
        """Make what was written durable, group by group, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._unwritten else None):
                    await self._dirty.wait()
            self._dirty.clear()
            await self.sync()

    async def sync(self) -> None:
        """Write what waits and fsync it, off the event loop."""
        self._write()
        retired, self._closing = self._closing, []
        try:
            # Shielded: who is cancelled here must not leave retired files open and not durable.
            await asyncio.shield(asyncio.to_thread(_sync, [*retired, self._file], retired))
        except OSError as error:
            logger.warning("cannot make usage records durable: %s", error)

    async def close(self) -> None:
        """Make everything durable and close the files. A journal without records leaves no file."""
        await self.sync()
        os.close(self._file)
        if not self._counts.get(self._segment):
            self._path(self._segment).unlink(missing_ok=True)

    # Segments ------------------------------------------------------------------------------------------------

    def _path(self, segment: int) -> Path:
        return self._folder / f"usage-{segment:08d}.jsonl"

    def _open(self, segment: int) -> int:
        return os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _write(self) -> None:
        """Append what waits, one line at a time."""
        for attempt_id, record in list(self._unwritten.items()):
            try:
                self._append(_encode(record) + b"\n")
            except OSError as error:
                logger.warning("cannot write usage records: %s; %d wait in memory", error, len(self._unwritten))
                return
            del self._unwritten[attempt_id]
            self._assign(attempt_id)

    def _append(self, line: bytes) -> None:
        """Write one whole line; what a full disk cut short is cut off again. Raises OSError."""
        if self._written and self._written + len(line) > self._segment_bytes:
            self._rotate()
        done = os.write(self._file, line)
        if done != len(line):
            os.ftruncate(self._file, self._written)
            raise OSError(f"only {done} of {len(line)} bytes were written")
        self._written += len(line)

    def _assign(self, attempt_id: str) -> None:
        """A record belongs to the segment its line is in, which a rotation may have changed since `add`."""
        entry = self._entries[attempt_id]
        if entry.segment != self._segment:
            self._counts[self._segment] = self._counts.get(self._segment, 0) + 1
            self._entries[attempt_id] = _Entry(entry.record, self._segment)
            self._release(entry.segment)

    def _rotate(self) -> None:
        fresh = self._open(self._segment + 1)
        self._closing.append(self._file)
        self._file = fresh
        self._segment += 1
        self._written = 0

    def _release(self, segment: int) -> None:
        """One record of `segment` is no longer needed; an empty segment gives its space back."""
        self._counts[segment] -= 1
        if self._counts[segment]:
            return
        del self._counts[segment]
        if segment != self._segment:
            self._path(segment).unlink(missing_ok=True)
        elif self._written:
            os.ftruncate(self._file, 0)
            self._written = 0

    def _drop_oldest(self) -> None:
        attempt_id = next(iter(self._entries))
        self.acknowledge([attempt_id])
        self.dropped += 1
        if self.dropped == 1 or self.dropped % 1000 == 0:
            logger.error("%d usage records were dropped: %d wait for the control plane", self.dropped, self._limit)

    def _replay(self) -> int:
        """Read every segment; the number of the last one. A line that cannot be read is skipped and counted."""
        last = 0
        for path in sorted(self._folder.glob("usage-*.jsonl")):
            number = path.stem.removeprefix("usage-")
            if not number.isdigit():
                continue
            last = int(number)
            for line in path.read_bytes().splitlines():
                try:
                    record = _decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self.unreadable += 1
                    continue
                if record.attempt_id not in self._entries:
                    self._entries[record.attempt_id] = _Entry(record, last)
                    self._counts[last] = self._counts.get(last, 0) + 1
            if last not in self._counts:
                path.unlink()
        if self.unreadable:
            logger.warning("%d torn or unreadable usage records were skipped", self.unreadable)
        while len(self._entries) > self._limit:
            self._segment = 0
            self._drop_oldest()
        return last


def _sync(descriptors: list[int], retired: list[int]) -> None:
    try:
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in retired:
            os.close(descriptor)
