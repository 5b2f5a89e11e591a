"""A gateway's journal of usage records: on disk until the ledger has them.

Layer: service. Owns the files of one folder: appending, fsync in groups, reading in order, giving space back. It never
looks into a record. Who awaits `append` knows that the record survives `kill -9` and a power cut; what was not awaited
may be lost at its end, never in the middle.

Files `usage-<n>.spool` are segments of frames: two bytes of mark, length and CRC-32 of length and payload (little
endian, 4 bytes each), payload. A start always opens a new segment. A frame cut short by the end of its process is
skipped, as is a damaged stretch: reading goes on at the next whole frame. A segment is deleted when all its records are
stored, so after a crash records stored already are read again; the ledger knows their attempt ids.

When `max_bytes` are held a record is refused (`SpoolFullError`): nothing acknowledged is dropped to make room. Callers
stop taking on work that would need a record while `accepting` is false, which leaves room for what runs already.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("tidegate.ledger")

MAX_BYTES = 256 * 1024 * 1024
SEGMENT_BYTES = 4 * 1024 * 1024
MAX_RECORD = 64 * 1024
GROUP_BYTES = 1024 * 1024
"""Bytes made durable by one fsync at most."""
READ_BYTES = 512 * 1024
HEADROOM = 8
"""One part in so many of `max_bytes` is kept for records of requests that run already."""

_MARK = b"\xa7U"
_HEADER = struct.Struct("<2sII")
_LENGTH = struct.Struct("<I")


class SpoolError(Exception):
    """A record was not made durable."""


class SpoolFullError(SpoolError):
    """No room: the ledger has not taken what is held."""


class SpoolBusyError(SpoolError):
    """Another process owns the folder."""


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
    done: asyncio.Future[None]


BEGINNING = Position(0, 0)


class Spool:
    """One process's journal, for one reader. Belongs to the event loop it was made in."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the journal with what an earlier process left. Raises SpoolBusyError, and OSError when unusable."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._lock = _lock(folder / "lock")
        self._sizes = self._left_over()
        self._number = max(self._sizes, default=0)
        self._file: int | None = None
        self._waiting: list[_Waiting] = []
        self._waiting_bytes = 0
        self._flushing: asyncio.Task[None] | None = None
        self._grown = asyncio.Event()
        self.skipped_bytes = 0
        """Bytes that were no whole frame: the torn end of a killed process, or damage."""

    @property
    def held_bytes(self) -> int:
        """Bytes on disk and waiting for it."""
        return sum(self._sizes.values()) + self._waiting_bytes

    @property
    def accepting(self) -> bool:
        """Whether there is room for the records of new work."""
        return self.held_bytes < self._max_bytes - self._max_bytes // HEADROOM

    async def append(self, payload: bytes) -> None:
        """Return once the record is durable; many at once share an fsync. Raises SpoolError."""
        if len(payload) > MAX_RECORD:
            raise SpoolError(f"a record has at most {MAX_RECORD} bytes")
        frame = _frame(payload)
        if self.held_bytes + len(frame) > self._max_bytes:
            raise SpoolFullError(f"the usage spool holds {self.held_bytes} bytes that the ledger has not taken")
        waiting = _Waiting(frame, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._waiting_bytes += len(frame)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush(), name="usage-spool")
        await waiting.done

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
        for number in [number for number in self._sizes if number < stored.segment]:
            self._delete(number)
        if stored >= self._end() and (self._file is None or self._sizes[self._number] >= self._segment_bytes // 16):
            self._retire()

    async def close(self, stored: Position = BEGINNING) -> None:
        """Make durable what waits and let go of the folder; a journal of which everything is `stored` leaves no
        segment. Nothing may be appended or read any more.
        """
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
                group = self._take()
                outcome = await self._make_durable(b"".join(one.frame for one in group))
                for one in group:
                    self._waiting_bytes -= len(one.frame)
                    if one.done.done():
                        continue
                    if outcome is None:
                        one.done.set_result(None)
                    else:
                        one.done.set_exception(outcome)
                self._grown.set()
        finally:
            self._flushing = None

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
            file = await asyncio.to_thread(_append, self._path(self._number), file, size, data)
        except OSError as error:
            log.error("usage records were not made durable: %s", error)  # noqa: TRY400  # the cause is in the sentence
            self._file = None
            return SpoolError(f"the usage spool cannot be written: {error.strerror}")
        finally:
            if before is not None and before != file:
                os.close(before)
        self._file = file
        self._sizes[self._number] = size + len(data)
        return None

    # Reading -------------------------------------------------------------------------------------------------

    def _read(self, sizes: dict[int, int], cursor: Position, most: int) -> tuple[Batch, int]:
        entries: list[Entry] = []
        skipped = 0
        for number in sorted(number for number in sizes if number >= cursor.segment):
            offset = cursor.offset if number == cursor.segment else 0
            data = self._bytes(number, offset, sizes[number])
            whole = offset + len(data) == sizes[number]
            used = 0
            for start, end, payload in _frames(data):
                if len(entries) == most:
                    return Batch(entries, Position(number, offset + used)), skipped
                skipped += start - used
                entries.append(Entry(Position(number, offset + start), payload))
                used = end
            rest = len(data) - used
            if not whole:  # a frame goes on beyond what was read; if none begins here there is nothing to wait for
                keep = min(rest, _HEADER.size + MAX_RECORD)
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
        del self._sizes[number]
        self._path(number).unlink(missing_ok=True)

    def _left_over(self) -> dict[int, int]:
        found = {}
        for path in self._folder.glob("usage-*.spool"):
            number, size = path.stem.removeprefix("usage-"), path.stat().st_size
            if not number.isdecimal():
                continue
            if size:
                found[int(number)] = size
            else:
                path.unlink()
        return dict(sorted(found.items()))

    def _path(self, number: int) -> Path:
        return self._folder / f"usage-{number:010d}.spool"


def _frame(payload: bytes) -> bytes:
    length = _LENGTH.pack(len(payload))
    return _HEADER.pack(_MARK, len(payload), zlib.crc32(payload, zlib.crc32(length))) + payload


def _frames(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, payload) of the whole frames in `data`; what lies between them is none."""
    at = data.find(_MARK)
    while at >= 0:
        frame = _frame_at(data, at)
        if frame is None:
            at = data.find(_MARK, at + 1)
            continue
        end, payload = frame
        yield at, end, payload
        at = end if data.startswith(_MARK, end) else data.find(_MARK, end)


def _frame_at(data: bytes, at: int) -> tuple[int, bytes] | None:
    if at + _HEADER.size > len(data):
        return None
    _, length, crc = _HEADER.unpack_from(data, at)
    end = at + _HEADER.size + length
    if length > MAX_RECORD or end > len(data):
        return None
    payload = data[at + _HEADER.size : end]
    return (end, payload) if zlib.crc32(payload, zlib.crc32(_LENGTH.pack(length))) == crc else None


def _append(path: Path, file: int | None, size: int, data: bytes) -> int:
    """Append and fsync; the open file. Raises OSError, the file closed and what lies beyond `size` cut off."""
    if file is None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _sync_folder(path.parent)
    try:
        done = 0
        while done < len(data):
            done += os.write(file, data[done:])
        os.fdatasync(file)
    except OSError:
        try:
            os.ftruncate(file, size)
        except OSError as error:
            log.warning("the end of a usage segment could not be cut off: %s", error)
        os.close(file)
        raise
    return file


def _lock(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise SpoolBusyError(f"another process writes usage records to {path.parent}") from None
    return file


def _sync_folder(folder: Path) -> None:
    """Make the folder's list of files durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
