"""A gateway's journal of usage records: on disk until the ledger has them.

Layer: service. Owns the files of one folder: appending, fsync in groups, reading in order, giving space back. It never
looks into a record. Who awaits `append` knows that the record survives `kill -9` and a power cut; what was only `put`
or not awaited may be lost at its end, never in the middle. A record that was `put` waits for company before it is
written, and in memory while the disk refuses it.

Files `usage-<n>.spool` are segments of frames: two bytes of mark, length and CRC-32 of length and payload (little
endian, 4 bytes each), payload. A start always opens a new segment. A frame cut short by the end of its process is
skipped, as is a damaged stretch: reading goes on at the next whole frame. A segment is deleted when all its records are
stored, so after a crash records stored already are read again; the ledger knows their attempt ids.

When `max_bytes` are held a record is refused (`SpoolFullError`): nothing acknowledged is dropped to make room. Callers
stop taking on work that would need a record while `accepting` is false, which leaves room for what runs already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from controlplane.ledger.segments import HEADER, MAX_RECORD, append_to, frame, frames, lock_file

log = logging.getLogger("tidegate.ledger")

MAX_BYTES = 256 * 1024 * 1024
SEGMENT_BYTES = 4 * 1024 * 1024
GROUP_BYTES = 1024 * 1024
"""Bytes made durable by one fsync at most."""
READ_BYTES = 512 * 1024
HEADROOM = 8
"""One part in so many of `max_bytes` is kept for records of requests that run already."""
LINGER_S = 0.05
"""How long a record that nobody awaits waits for others to share its fsync."""
RETRY_S = 1.0
"""Pause before a disk that refused such records is tried again."""
MARK_S = 1.0
"""How exactly the age of the oldest record is known."""
MOST_MARKS = 4_096


class SpoolError(Exception):
    """A record was not made durable."""


class SpoolFullError(SpoolError):
    """No room: the ledger has not taken what is held."""


class Position(NamedTuple):
    """A place between frames."""

    segment: int
    offset: int


class Entry(NamedTuple):
    """One record and where its frame starts."""

    start: Position
    payload: bytes


class Batch(NamedTuple):
    """Records in order, and where to read on."""

    entries: list[Entry]
    cursor: Position


class _Waiting(NamedTuple):
    frame: bytes
    done: asyncio.Future[None] | None
    """None when nobody awaits it."""


class _Mark(NamedTuple):
    """What lies before `end` and beyond the mark before was written at `at` (Unix seconds) or soon after."""

    end: Position
    at: float


BEGINNING = Position(0, 0)


class Spool:
    """One process's journal, for one reader. Belongs to the event loop it was made in."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = MAX_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        linger_s: float = LINGER_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Open the journal with what an earlier process left. Raises SpoolBusyError, and OSError when unusable."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._linger_s = linger_s
        self._wall = wall
        self._marks: deque[_Mark] = deque()
        self._lock = lock_file(folder / "lock")
        self._sizes = self._left_over()
        self._on_disk = sum(self._sizes.values())
        self._number = max(self._sizes, default=0)
        self._file: int | None = None
        self._waiting: list[_Waiting] = []
        self._waiting_bytes = 0
        self._flushing: asyncio.Task[None] | None = None
        self._awaited = 0
        self._hurry = asyncio.Event()
        """Somebody awaits a record, a group is full, or the spool closes: no lingering."""
        self._closing = self._refused = False
        self._grown = asyncio.Event()
        self.lost = 0
        """Records that nobody awaited and that no disk had taken at the end."""
        self.skipped_bytes = 0
        """Bytes that were no whole frame: the torn end of a killed process, or damage."""

    @property
    def held_bytes(self) -> int:
        """Bytes on disk and waiting for it."""
        return self._on_disk + self._waiting_bytes

    @property
    def accepting(self) -> bool:
        """Whether there is room for the records of new work."""
        return self.held_bytes < self._max_bytes - self._max_bytes // HEADROOM

    async def append(self, payload: bytes) -> None:
        """Return once the record is durable; many at once share an fsync. Raises SpoolError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enqueue(payload, done)
        self._awaited += 1
        self._hurry.set()
        try:
            await done
        finally:
            self._awaited -= 1

    def put(self, payload: bytes) -> None:
        """Write the record soon, without anybody waiting for the disk. Raises SpoolError when there is no room."""
        self._enqueue(payload, None)
        if self._waiting_bytes >= min(GROUP_BYTES, self._segment_bytes) and not self._refused:
            self._hurry.set()

    def _enqueue(self, payload: bytes, done: asyncio.Future[None] | None) -> None:
        if len(payload) > MAX_RECORD:
            raise SpoolError(f"a record has at most {MAX_RECORD} bytes")
        data = frame(payload)
        if self.held_bytes + len(data) > self._max_bytes:
            raise SpoolFullError(f"the usage spool holds {self.held_bytes} bytes that the ledger has not taken")
        self._waiting.append(_Waiting(data, done))
        self._waiting_bytes += len(data)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush(), name="usage-spool")

    @property
    def oldest_at(self) -> float | None:
        """About when the oldest record was written that is not known to be stored (Unix seconds); None without one."""
        return self._marks[0].at if self._marks else None

    def bytes_after(self, stored: Position) -> int:
        """Bytes beyond `stored`, on disk and waiting for it."""
        before = sum(size for number, size in self._sizes.items() if number < stored.segment)
        return self.held_bytes - before - min(stored.offset, self._sizes.get(stored.segment, 0))

    async def read(self, cursor: Position, most: int) -> Batch:
        """At most `most` durable records from `cursor` on; a cursor that moved without any says to read again."""
        sizes = dict(self._sizes)
        batch, skipped = await asyncio.to_thread(self._read, sizes, cursor, most)
        if skipped:
            self.skipped_bytes += skipped
            log.warning("%d bytes of the usage spool were no whole record and were skipped", skipped)
        return batch

    async def beyond(self, cursor: Position) -> None:
        """Wait until something durable lies beyond `cursor`."""
        while cursor >= self._end():
            self._grown.clear()
            await self._grown.wait()

    def trim(self, stored: Position) -> None:
        """Everything before `stored` is in the ledger: delete the segments that hold nothing else."""
        while self._marks and self._marks[0].end <= stored:
            self._marks.popleft()
        for number in [number for number in self._sizes if number < stored.segment]:
            self._delete(number)
        if stored >= self._end() and (self._file is None or self._sizes[self._number] >= self._segment_bytes // 16):
            self._retire()

    async def close(self, stored: Position = BEGINNING) -> None:
        """Make durable what waits and let go of the folder; a journal of which everything is `stored` leaves no
        segment. Nothing may be appended or read any more.
        """
        self._closing = True
        self._hurry.set()
        if self._flushing is not None:
            await self._flushing
        self.trim(stored)
        if stored >= self._end():
            self._retire()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        os.close(self._lock)

    # Writing -------------------------------------------------------------------------------------------------

    async def _flush(self) -> None:
        try:
            while self._waiting:
                if self._waiting_bytes < min(GROUP_BYTES, self._segment_bytes):
                    await self._pause(self._linger_s)
                group = self._take()
                outcome = await self._make_durable(b"".join(one.frame for one in group))
                again = [one for one in group if not self._told(one, outcome)]
                self._grown.set()
                if again:
                    self._waiting[:0] = again
                    await self._pause(RETRY_S)
        finally:
            self._flushing = None

    async def _pause(self, longest_s: float) -> None:
        """Unless somebody waits."""
        if not self._awaited and not self._closing:
            self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._hurry.wait()

    def _told(self, one: _Waiting, outcome: SpoolError | None) -> bool:
        """Tell who awaits a record what became of it; False for one that nobody does and that must be tried again,
        which at the end none is.
        """
        if one.done is None and outcome is not None:
            if not self._closing:
                return False
            self.lost += 1
        self._waiting_bytes -= len(one.frame)
        if one.done is not None and not one.done.done():
            if outcome is None:
                one.done.set_result(None)
            else:
                one.done.set_exception(outcome)
        return True

    def _take(self) -> list[_Waiting]:
        size = number = 0
        for one in self._waiting:
            if number and size + len(one.frame) > min(GROUP_BYTES, self._segment_bytes):
                break
            size, number = size + len(one.frame), number + 1
        group, self._waiting = self._waiting[:number], self._waiting[number:]
        return group

    async def _make_durable(self, data: bytes) -> SpoolError | None:
        """Append a group to the open segment or to a new one; why not, if not.

        After a failed fsync nobody can say what of the file is durable, so the next group goes to a new segment.
        """
        before = self._file
        file, size = before, self._sizes.get(self._number, 0)
        if file is None or size + len(data) > self._segment_bytes:
            self._number, file, size = self._number + 1, None, 0
        try:
            file = await asyncio.to_thread(append_to, self._path(self._number), file, size, data)
        except OSError as error:
            log.error("usage records were not made durable: %s", error)  # noqa: TRY400  # the cause is in the sentence
            self._file, self._refused = None, True
            return SpoolError(f"the usage spool cannot be written: {error.strerror}")
        finally:
            if before is not None and before != file:
                os.close(before)
        self._file, self._refused = file, False
        self._sizes[self._number] = size + len(data)
        self._on_disk += len(data)
        self._mark()
        return None

    def _mark(self) -> None:
        """Remember when what was just written was; the newest mark grows while it is young, or when there are many."""
        now, end = self._wall(), self._end()
        if self._marks and (now - self._marks[-1].at < MARK_S or len(self._marks) >= MOST_MARKS):
            self._marks[-1] = _Mark(end, self._marks[-1].at)
        else:
            self._marks.append(_Mark(end, now))

    # Reading -------------------------------------------------------------------------------------------------

    def _read(self, sizes: dict[int, int], cursor: Position, most: int) -> tuple[Batch, int]:
        entries: list[Entry] = []
        skipped = 0
        for number in sorted(number for number in sizes if number >= cursor.segment):
            offset = cursor.offset if number == cursor.segment else 0
            data = self._bytes(number, offset, sizes[number])
            whole = offset + len(data) == sizes[number]
            used = 0
            for start, end, payload in frames(data):
                if len(entries) == most:
                    return Batch(entries, Position(number, offset + used)), skipped
                skipped += start - used
                entries.append(Entry(Position(number, offset + start), payload))
                used = end
            rest = len(data) - used
            if not whole:  # a frame goes on beyond what was read; if none begins here there is nothing to wait for
                keep = min(rest, HEADER.size + MAX_RECORD)
                skipped += rest - keep
                return Batch(entries, Position(number, offset + len(data) - keep)), skipped
            skipped += rest
            cursor = Position(number, sizes[number])
        return Batch(entries, cursor), skipped

    def _bytes(self, number: int, offset: int, size: int) -> bytes:
        with self._path(number).open("rb") as file:
            file.seek(offset)
            return file.read(min(READ_BYTES, size - offset))

    # Segments ------------------------------------------------------------------------------------------------

    def _end(self) -> Position:
        last = max(self._sizes, default=0)
        return Position(last, self._sizes.get(last, 0))

    def _retire(self) -> None:
        """Delete the last segment; the next group opens another. Not while one is being written."""
        if self._flushing is None and self._sizes:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._delete(max(self._sizes))

    def _delete(self, number: int) -> None:
        self._on_disk -= self._sizes.pop(number)
        self._path(number).unlink(missing_ok=True)

    def _left_over(self) -> dict[int, int]:
        found: dict[int, int] = {}
        ages: list[float] = []
        for path in self._folder.glob("usage-*.spool"):
            number, size = path.stem.removeprefix("usage-"), path.stat().st_size
            if not number.isdecimal():
                continue
            if size:
                found[int(number)] = size
                ages.append(path.stat().st_mtime)
            else:
                path.unlink()
        if found:
            last = max(found)
            self._marks.append(_Mark(Position(last, found[last]), min(ages)))
        return dict(sorted(found.items()))

    def _path(self, number: int) -> Path:
        return self._folder / f"usage-{number:010d}.spool"
