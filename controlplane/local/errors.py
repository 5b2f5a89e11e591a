"""What can go wrong while running Tidegate on one machine, as one sentence and an exit code.

Layer: service. Nothing here prints; `cli` does, once, and never with a traceback.
"""

from __future__ import annotations

import enum
import errno
from pathlib import Path


class ExitCode(enum.IntEnum):
    """What `tidegate up` and `tidegate doctor` exit with."""

    OK = 0
    FAILED = 1
    """A check did not hold, or doctor found something wrong."""
    USAGE = 2
    """A flag or an environment variable is wrong."""
    PORT_IN_USE = 3
    DISK_FULL = 4
    NO_PERMISSION = 5
    SERVICE_UNREACHABLE = 6
    """DATABASE_URL or REDIS_URL is broken or does not answer."""
    DATA_VERSION = 7
    """The data folder was made by another PostgreSQL major version."""
    ALREADY_RUNNING = 8
    """Another supervisor owns this home folder."""
    START_FAILED = 9
    """A process did not become ready, or kept crashing."""
    MISSING = 10
    """Something that must be installed is not."""
    DAMAGED = 11
    """A file in the data folder is not what Tidegate wrote there."""
    INTERRUPTED = 130
    """Killed by a Ctrl-C while it stopped, or a check cut short by one."""


class LocalError(Exception):
    """An expected failure: `message` is one sentence for the person at the terminal."""

    def __init__(self, message: str, code: ExitCode = ExitCode.START_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def from_os_error(
    error: OSError, what: str, path: Path | None = None, otherwise: ExitCode = ExitCode.START_FAILED
) -> LocalError:
    """`error` met while doing `what` ("read", "create the folder"), as a sentence that says what to do about it.

    `otherwise` is the code of what is neither a full disk nor a missing permission.
    """
    target = f" {path}" if path is not None else f" {error.filename}" if error.filename else ""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return LocalError(
                f"cannot {what}{target}: the disk is full; free some space or pass --home on another disk",
                ExitCode.DISK_FULL,
            )
        case errno.EACCES | errno.EPERM if what == "read":
            return LocalError(
                f"cannot read{target}: no read permission; run as the user it belongs to or pass another --home",
                ExitCode.NO_PERMISSION,
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return LocalError(
                f"cannot {what}{target}: no write permission; pass --home with a folder you may write to",
                ExitCode.NO_PERMISSION,
            )
        case _:
            return LocalError(f"cannot {what}{target}: {error.strerror or error}", otherwise)


def damaged(path: Path) -> LocalError:
    """The file at `path` is not what Tidegate wrote there."""
    return LocalError(
        f"{path} is damaged: it is not what `tidegate up` writes; restore it, or move it away and start again, "
        "which makes a new one",
        ExitCode.DAMAGED,
    )
