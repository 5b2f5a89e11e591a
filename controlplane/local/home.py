"""The home folder: where one installation on this machine keeps everything it must not lose.

Layer: service. It owns the folder's layout, its lock and its secrets; nobody else invents a file name in it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec

from controlplane.local.errors import ExitCode, LocalError, damaged, from_os_error
from controlplane.local.files import FolderLock, kept_secret, make_folder, write_private
from controlplane.settings import Secret

StructT = TypeVar("StructT", bound=msgspec.Struct)

LEAST_FREE_BYTES = 400 * 1024 * 1024
"""A new PostgreSQL folder with its write-ahead log, and room for logs and spools."""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where the running processes listen; written while they run, for the command line and doctor."""

    pid: int
    started_at: float
    control_url: str
    gateway_url: str
    replica_urls: list[str]


class Home:
    """`open` before use, `close` at the end; only one supervisor at a time holds it open."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = FolderLock(self.run / "supervisor.lock")

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def postgres(self) -> Path:
        return self.path / "pg"

    @property
    def valkey(self) -> Path:
        return self.path / "valkey"

    @property
    def admin_file(self) -> Path:
        return self.path / "admin.json"

    @property
    def demo_file(self) -> Path:
        return self.path / "demo.json"

    @property
    def endpoints_file(self) -> Path:
        return self.run / "endpoints.json"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def secret(self, name: str) -> Secret:
        """`internal`, `session` or `metrics`: made the first time, the same ever after."""
        return kept_secret(self.path / f"{name}.secret")

    def open(self) -> None:
        """Create what is missing, see that it can be written and has room, and take the lock. Raises LocalError."""
        fresh = not self.path.exists()
        # As root the servers run as another user: it must be able to pass through, and no more.
        make_folder(self.path, (0o711 if os.geteuid() == 0 else 0o700) if fresh else self.path.stat().st_mode & 0o777)
        for folder in (self.logs, self.run):
            make_folder(folder)
        self._lock.acquire(f"the home folder {self.path}")
        free = shutil.disk_usage(self.path).free
        if free < LEAST_FREE_BYTES:
            raise LocalError(
                f"the disk of {self.path} has {free // 2**20} MiB free and Tidegate needs {LEAST_FREE_BYTES // 2**20}: "
                "the disk is full; free some space or pass --home on another disk",
                ExitCode.DISK_FULL,
            )

    def close(self) -> None:
        self.endpoints_file.unlink(missing_ok=True)
        self._lock.release()

    def publish(self, endpoints: Endpoints) -> None:
        write_private(self.endpoints_file, msgspec.json.encode(endpoints).decode() + "\n")

    def endpoints(self) -> Endpoints | None:
        """Where things listen, or None when nothing runs."""
        return load_struct(self.endpoints_file, Endpoints)


def load_struct(path: Path, kind: type[StructT]) -> StructT | None:
    """The struct kept in `path`, or None when it is absent."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, "read", path) from None
    except msgspec.MsgspecError:
        raise damaged(path) from None
