"""The embedded PostgreSQL: a real server from a wheel's binaries, in one folder, for as long as we live.

Layer: service. It initialises, starts, finds leftovers of a killed predecessor and stops; it never creates an
operating-system user, never loosens a folder's permissions and never deletes a data folder that holds data.

Beside the data folder `pg` it keeps `pg.password` (600), `pg.lock`, `pg.log` and, while initialising, `pg.new`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psycopg

from controlplane.local import binaries, ports
from controlplane.local.child import Child, spawn, wait_readable, wrap
from controlplane.local.errors import ExitCode, LocalError, from_os_error
from controlplane.local.files import FolderLock, make_folder, write_private

USER = "tidegate"
DATABASE = "tidegate"
SOCKET_PATH_LIMIT = 107 - len("/.s.PGSQL.65535.lock")
ATTEMPT_S = 0.05


class EmbeddedPostgres:
    """`start` from the main thread; `url` is valid once it returned. `port` 0 takes a free one at start.

    `options` are server settings on top of ours, such as {"fsync": "off"} for tests.
    """

    def __init__(
        self, data: Path, port: int = 0, *, log: Path | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self.data = Path(data).absolute()
        self.port = port
        self.log = log or self._beside("log")
        self.options = dict(options or {})
        self.child: Child | None = None
        self._chosen_port = port
        self._lock = FolderLock(self._beside("lock"))
        self._environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/"}

    def _beside(self, suffix: str) -> Path:
        return self.data.with_name(f"{self.data.name}.{suffix}")

    @property
    def password(self) -> str:
        return self._beside("password").read_text(encoding="utf-8").strip()

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{self.password}@{ports.LOOPBACK}:{self.port}/{DATABASE}"

    def start(self, timeout: float = 60.0) -> None:
        """Initialise the folder the first time, start the server and wait until it answers. Raises LocalError."""
        folder = binaries.postgres_folder()
        make_folder(self.data.parent, _mode_of(self.data.parent))
        self._lock.acquire(f"the data folder {self.data}")
        try:
            user = binaries.os_user(self.data)
            self._initialise(folder, user, timeout)
            self._end_leftover(timeout)
            self._launch(folder, user, time.monotonic() + timeout)
            self._create_database()
        except BaseException:
            self.stop()
            raise

    def stop(self, grace: float = 20.0) -> None:
        """Fast shutdown: sessions end, everything is on disk. Safe to call at any time."""
        if self.child is not None:
            self.child.stop(signal.SIGINT, grace)
            self.child = None
            with contextlib.suppress(OSError):  # a server that had to be killed leaves its socket to the next start
                self._socket_place().rmdir()
        self._lock.release()

    # -- first start ---------------------------------------------------------------------------------------

    def _initialise(self, folder: Path, user: str | None, timeout: float) -> None:
        version_file = self.data / "PG_VERSION"
        try:
            found = version_file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            found = ""
        except OSError as error:
            raise from_os_error(error, "read", version_file) from None
        if found:
            self._require_same_major(folder, found)
            return
        if self.data.exists() and any(self.data.iterdir()):
            raise LocalError(
                f"{self.data} is not empty and holds no PostgreSQL data; pass another --home", ExitCode.USAGE
            )
        fresh = self._beside("new")
        shutil.rmtree(fresh, ignore_errors=True)
        make_folder(fresh, 0o700, user)
        password = secrets.token_urlsafe(24)
        try:
            self._initdb(folder, fresh, user, password, timeout)
            write_private(self._beside("password"), password + "\n")
            with contextlib.suppress(FileNotFoundError):
                self.data.rmdir()
            fresh.rename(self.data)
        except OSError as error:
            raise from_os_error(error, "initialise", self.data) from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _initdb(self, folder: Path, target: Path, user: str | None, password: str, timeout: float) -> None:
        """The password travels through a pipe: it is in no file, argument or environment."""
        reading, writing = os.pipe()
        try:
            os.write(writing, f"{password}\n".encode())
            os.close(writing)
            if user is not None:
                account_owner = target.stat()
                os.fchown(reading, account_owner.st_uid, account_owner.st_gid)
            command: list[str | Path] = [
                folder / "initdb",
                "--pgdata",
                target,
                "--username",
                USER,
                "--encoding=UTF8",
                "--locale=C.UTF-8",
            ]
            command += ["--data-checksums", "--auth=scram-sha-256", f"--pwfile=/dev/fd/{reading}", "--no-instructions"]
            done = subprocess.run(  # noqa: S603 - fixed argument list, no shell
                wrap(command, death_signal=signal.SIGKILL, user=user, reach=[folder / "initdb", target]),
                env=self._environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[reading],
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LocalError(f"initialising {self.data} took longer than {timeout:.0f} s") from None
        finally:
            os.close(reading)
        if done.returncode:
            raise _explain(done.stdout, f"cannot initialise {self.data}")

    def _require_same_major(self, folder: Path, found: str) -> None:
        ours = binaries.program_version(folder / "postgres").split(".")[0]
        if found != ours:
            raise LocalError(
                f"{self.data} was made by PostgreSQL {found} and this is PostgreSQL {ours}: dump it "
                f"with PG_BIN_DIR set to the programs of PostgreSQL {found}, or move the folder away to start empty",
                ExitCode.DATA_VERSION,
            )

    # -- every start ---------------------------------------------------------------------------------------

    def _end_leftover(self, timeout: float) -> None:
        """We hold the lock, so a server still running on this folder lost its supervisor: stop it, never join it.

        A recorded pid that now belongs to another program is replaced by our own: PostgreSQL takes its parent's
        pid for stale, and still looks for backends attached to the old shared memory.
        """
        record = self.data / "postmaster.pid"
        try:
            lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
            pid = int(lines[0])
        except (FileNotFoundError, ValueError, IndexError):
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        with os.fdopen(descriptor, "rb") as pidfd:
            if not _serves(pid, self.data):
                lines[0] = f"{os.getpid()}\n"
                record.write_text("".join(lines), encoding="utf-8")
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd.fileno(), signal.SIGINT)
            if not wait_readable(pidfd.fileno(), timeout):
                raise LocalError(
                    f"a PostgreSQL left over from a killed run (process {pid}) does not stop; end it first"
                )

    def _launch(self, folder: Path, user: str | None, deadline: float) -> None:
        if self._chosen_port:
            ports.require_free(ports.Listener(self._chosen_port, "PostgreSQL", "--port-postgres"))
        sockets = self._socket_folder(user)
        while True:
            self.port = self._chosen_port or ports.free_ports(1)[0]
            begin = self._log_size()
            settings = {
                "listen_addresses": ports.LOOPBACK,
                "port": str(self.port),
                "unix_socket_directories": str(sockets),
                "unix_socket_permissions": "0700",
                "shared_buffers": "64MB",
                "max_connections": "100",
                "log_min_messages": "warning",
                "log_line_prefix": "%m [%p] ",
            } | self.options
            command: list[str | Path] = [folder / "postgres", "-D", self.data]
            for name, value in settings.items():
                command += ["-c", f"{name}={value}"]
            try:
                self.child = spawn(
                    "postgres",
                    command,
                    log=self.log,
                    environment=self._environment,
                    cwd=Path("/"),
                    death_signal=signal.SIGINT,
                    user=user,
                    reach=[folder / "postgres", self.data, sockets],
                )
            except OSError as error:
                raise from_os_error(error, "start PostgreSQL, log", self.log) from None
            if self._answers(deadline):
                return
            self.child.close()
            self.child = None
            said = self._log_since(begin)
            if self._chosen_port or "Address already in use" not in said:
                raise _explain(said, f"PostgreSQL did not start (log: {self.log})")

    def _answers(self, deadline: float) -> bool:
        """True once a connection succeeds, False when the server ended instead."""
        assert self.child is not None
        while time.monotonic() < deadline:
            try:
                psycopg.connect(self._dsn("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError as error:
                if "password authentication failed" in str(error):
                    raise LocalError(f"the password in {self._beside('password')} does not open {self.data}") from None
            else:
                return True
            if self.child.wait(ATTEMPT_S) is not None:
                return False
        raise LocalError(f"PostgreSQL did not answer in time (log: {self.log})")

    def _create_database(self) -> None:
        with psycopg.connect(self._dsn("postgres"), autocommit=True, connect_timeout=5) as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
            if known is None:
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def _dsn(self, database: str) -> str:
        try:
            password = self.password
        except FileNotFoundError:
            raise LocalError(
                f"{self._beside('password')} is missing; without it {self.data} cannot be opened"
            ) from None
        except OSError as error:
            raise from_os_error(error, "read", self._beside("password")) from None
        return f"postgresql://{USER}:{password}@{ports.LOOPBACK}:{self.port}/{database}"

    def _socket_place(self) -> Path:
        """Where the sockets lie: beside the data, or when that path is too long for one among the temporary files."""
        folder = self._beside("socket")
        if len(os.fsencode(folder)) <= SOCKET_PATH_LIMIT:
            return folder
        digest = hashlib.sha256(os.fsencode(self.data)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"tidegate-{os.geteuid()}-{digest}"

    def _socket_folder(self, user: str | None) -> Path:
        """The sockets' folder, our own; leftovers of a killed server are removed."""
        folder = self._socket_place()
        with contextlib.suppress(FileNotFoundError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), self.data.stat().st_uid}:
                raise LocalError(f"{folder} belongs to somebody else; remove it", ExitCode.NO_PERMISSION)
        make_folder(folder, 0o700, user)
        for leftover in folder.glob(".s.PGSQL.*"):
            leftover.unlink(missing_ok=True)
        return folder

    def _log_size(self) -> int:
        try:
            return self.log.stat().st_size
        except FileNotFoundError:
            return 0

    def _log_since(self, begin: int) -> str:
        with self.log.open("rb") as stream:
            stream.seek(begin)
            return stream.read(64 * 1024).decode(errors="replace")


def _mode_of(folder: Path) -> int:
    """An existing folder keeps its mode; a new one is ours alone, yet passable when servers run as another user."""
    if folder.exists():
        return stat.S_IMODE(folder.stat().st_mode)
    return 0o711 if os.geteuid() == 0 else 0o700


def _serves(pid: int, data: Path) -> bool:
    """True when process `pid` is a PostgreSQL server over `data`."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return Path(os.fsdecode(arguments[0])).name == "postgres" and os.fsencode(data) in arguments


def _explain(said: str, otherwise: str) -> LocalError:
    """What the server printed before it gave up, as one sentence."""
    if "No space left on device" in said:
        return LocalError(
            f"{otherwise}: the disk is full; free some space or pass --home on another disk", ExitCode.DISK_FULL
        )
    if "Address already in use" in said:
        return LocalError(f"{otherwise}: its port is in use", ExitCode.PORT_IN_USE)
    if "Permission denied" in said:
        return LocalError(f"{otherwise}: no permission on its files", ExitCode.NO_PERMISSION)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "FATAL" in line or "error:" in line or line.startswith("tidegate:")]
    last = (telling or lines or ["it said nothing"])[-1]
    return LocalError(f"{otherwise}: {last}")
