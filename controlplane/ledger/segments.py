"""Frames in a spool's files, and what is done to the files themselves.

Layer: service. Blocking file work for a thread; it knows nothing of who writes or reads when.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("tidegate.ledger")

MAX_RECORD = 64 * 1024
HEADER = struct.Struct("<2sII")

_MARK = b"\xa7U"
_LENGTH = struct.Struct("<I")


class SpoolBusyError(Exception):
    """Another process owns the folder."""


def frame(payload: bytes) -> bytes:
    length = _LENGTH.pack(len(payload))
    return HEADER.pack(_MARK, len(payload), zlib.crc32(payload, zlib.crc32(length))) + payload


def frames(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, payload) of the whole frames in `data`; what lies between them is none."""
    at = data.find(_MARK)
    while at >= 0:
        found = _frame_at(data, at)
        if found is None:
            at = data.find(_MARK, at + 1)
            continue
        end, payload = found
        yield at, end, payload
        at = end if data.startswith(_MARK, end) else data.find(_MARK, end)


def _frame_at(data: bytes, at: int) -> tuple[int, bytes] | None:
    if at + HEADER.size > len(data):
        return None
    _, length, crc = HEADER.unpack_from(data, at)
    end = at + HEADER.size + length
    if length > MAX_RECORD or end > len(data):
        return None
    payload = data[at + HEADER.size : end]
    return (end, payload) if zlib.crc32(payload, zlib.crc32(_LENGTH.pack(length))) == crc else None


def append_to(path: Path, file: int | None, size: int, data: bytes) -> int:
    """Append to the open file of `size` bytes, or to a new one, and fsync; the open file.

    Raises OSError, the file closed and what lies beyond `size` cut off, or all of it removed when it is new: while a
    disk refuses, each try has a file of its own.
    """
    if file is None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if not size:
            _sync_folder(path.parent)
        done = 0
        while done < len(data):
            done += os.write(file, data[done:])
        os.fdatasync(file)
    except OSError:
        try:
            os.ftruncate(file, size)
            if not size:
                path.unlink()
        except OSError as error:
            log.warning("the end of a usage segment could not be cut off: %s", error)
        os.close(file)
        raise
    return file


def lock_file(path: Path) -> int:
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
