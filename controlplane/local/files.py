"""Folders, secrets and locks on this machine's disk.

Layer: service. Every failure becomes one sentence; a secret is never readable by others, not even while it is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
from pathlib import Path

from controlplane.local.errors import ExitCode, LocalError, damaged, from_os_error
from controlplane.settings import SHORTEST_SECRET, Secret


def make_folder(path: Path, mode: int = 0o700, user: str | None = None) -> Path:
    """`path` as a folder with `mode`, owned by `user` when given."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        give(path, user)
    except OSError as error:
        raise from_os_error(error, "create the folder", path, ExitCode.NO_PERMISSION) from None
    return path


def give(path: Path, user: str | None) -> None:
    """Make `user` the owner of `path`; None leaves it."""
    if user is not None:
        account = pwd.getpwnam(user)
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def write_private(path: Path, text: str, user: str | None = None) -> None:
    """Replace `path` by `text` in one step, mode 600, durable before it becomes visible."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(descriptor, 0o600)
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
        give(fresh, user)
        fresh.replace(path)
    except OSError as error:
        raise from_os_error(error, "write", path) from None


def kept_secret(path: Path) -> Secret:
    """The secret in `path`; made and kept there the first time."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise from_os_error(error, "read", path) from None
    except UnicodeDecodeError:
        raise damaged(path) from None
    if text and len(text) < SHORTEST_SECRET:
        raise damaged(path)
    if not text:
        text = secrets.token_urlsafe(32)
        write_private(path, text + "\n")
    return Secret(text)


class FolderLock:
    """An advisory lock on `path`, held until `release` or the process's end, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, what: str) -> None:
        """Take the lock or raise LocalError naming the process that holds it."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise from_os_error(error, "write", self.path) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            by = f" by process {holder}" if holder else ""
            raise LocalError(f"{what} is in use{by}; stop that one first", ExitCode.ALREADY_RUNNING) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
