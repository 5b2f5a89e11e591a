"""Bounded log files of the children.

Layer: service. Children append to files they hold open, so a file that grew too large is copied aside and cut
to nothing in place; at most one older copy is kept. Nothing of a log's content is interpreted here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MAX_BYTES = 8 * 1024 * 1024


def bound(log: Path, max_bytes: int = MAX_BYTES) -> bool:
    """Move what is in `log` to `<log>.1` when it is larger than `max_bytes`. True when it did."""
    try:
        if log.stat().st_size <= max_bytes:
            return False
        older = log.with_name(f"{log.name}.1")
        shutil.copyfile(log, older)
        older.chmod(0o600)
        os.truncate(log, 0)
    except FileNotFoundError:
        return False
    return True


def last_line(log: Path, begin: int = 0) -> str:
    """The last line written after byte `begin`, shortened; empty when there is none."""
    try:
        with log.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(begin if begin <= size else 0, size - 8192))
            lines = stream.read(8192).decode(errors="replace").splitlines()
    except OSError:
        return ""
    written = [line.strip() for line in lines if line.strip()]
    return written[-1][:300] if written else ""
