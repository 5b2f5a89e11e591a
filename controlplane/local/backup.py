"""Backing up a home and its database, running or not, and restoring it into an empty one.

Layer: service. The database is dumped in one snapshot by PostgreSQL's own program, so a backup of a running stack is
consistent. What Redis holds is hydrated from the database and not backed up; logged prompts are not either, because a
tenant that turns its log off must find them nowhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from alembic.script import ScriptDirectory
from sqlalchemy.exc import SQLAlchemyError

from controlplane import migrate
from controlplane.local import binaries, ports
from controlplane.local.archive import DUMP, FORMAT, Manifest, check_archive, digest, unpack, write_archive
from controlplane.local.errors import ExitCode, LocalError, from_os_error
from controlplane.local.home import Home
from controlplane.local.postgres import DATABASE, USER, EmbeddedPostgres
from controlplane.settings import Secret

SECRETS = ("internal.secret", "session.secret", "metrics.secret", "admin.json", "demo.json")
"""Files of a home that make it the same installation."""
FOLDER = "home/"
LEFT_OUT = ("logged_requests",)
"""Tables whose rows are not backed up."""
LONGEST_S = 3600.0
OWN_FOLDERS = frozenset({"run", "logs"})


def back_up(home_path: Path, target: Path, *, secrets: bool = True) -> Manifest:
    """Write a backup of the home and its database to `target`, mode 600. Raises LocalError; nothing is left then."""
    target = target.absolute()
    home = Home(home_path)
    if target.exists():
        raise LocalError(f"{target} exists already; name another file", ExitCode.USAGE)
    if not target.parent.is_dir():
        raise LocalError(f"{target.parent} is no folder", ExitCode.USAGE)
    if not (home.postgres / "PG_VERSION").exists():
        raise LocalError(
            f"{home.path} holds no PostgreSQL data: nothing was started there, or DATABASE_URL named another database, "
            "which its own tools back up",
            ExitCode.USAGE,
        )
    with _private_folder(target.parent) as folder, _database(home) as server:
        dump = folder / DUMP
        left_out = [f"--exclude-table-data={table}" for table in LEFT_OUT]
        _run("pg_dump", server, ["--format=custom", *left_out, f"--file={dump}", DATABASE], "dump the database")
        revision = _revision(server.url)
        files = {DUMP: dump}
        if secrets:
            files |= {FOLDER + name: home.path / name for name in SECRETS if (home.path / name).exists()}
        manifest = Manifest(
            format=FORMAT,
            tidegate=version("tidegate"),
            postgres=binaries.program_version(binaries.postgres_folder() / "postgres"),
            revision=revision,
            made_at=time.time(),
            secrets=secrets,
            parts={name: digest(path) for name, path in files.items()},
        )
        write_archive(target, manifest, files)
    return manifest


def restore(source: Path, home_path: Path) -> Manifest:
    """Make `home_path`, which must be empty, what it was when `source` was made.

    Raises LocalError, and nothing is left then. `tidegate up` migrates the database when the backup is older.
    """
    manifest = check_archive(source)
    _require_readable(source, manifest)
    home = Home(home_path)
    _require_empty(home)
    fresh = not home.path.exists()
    home.open()
    try:
        with _private_folder(home.path) as folder:
            unpack(source, folder, tuple(manifest.parts))
            for name in SECRETS:
                if (folder / name).exists():
                    (folder / name).replace(home.path / name)
            server = EmbeddedPostgres(home.postgres, log=home.log("postgres"))
            server.start()
            try:
                exact = ["--exit-on-error", "--no-owner", "--single-transaction", f"--dbname={DATABASE}"]
                _run("pg_restore", server, [*exact, str(folder / DUMP)], "restore the database")
            finally:
                server.stop()
    except BaseException:
        home.close()
        _clear(home.path, fresh)
        raise
    home.close()
    return manifest


def _require_readable(source: Path, manifest: Manifest) -> None:
    """Raise LocalError when this installation is older than the one that made the backup."""
    ours = binaries.program_version(binaries.postgres_folder() / "postgres")
    if int(manifest.postgres.split(".")[0]) > int(ours.split(".")[0]):
        raise LocalError(
            f"{source} was made by PostgreSQL {manifest.postgres} and this is {ours}: restore it with a newer one",
            ExitCode.DATA_VERSION,
        )
    script = ScriptDirectory.from_config(migrate.alembic_config(Secret("postgresql://localhost/tidegate")))
    if manifest.revision not in {known.revision for known in script.walk_revisions()}:
        raise LocalError(
            f"{source} was made by Tidegate {manifest.tidegate}, whose database ({manifest.revision}) is not known "
            "here; restore it with that one",
            ExitCode.USAGE,
        )


def _require_empty(home: Home) -> None:
    """Raise LocalError when something runs in the home, or anything is in it."""
    try:
        found = sorted(path.name for path in home.path.iterdir()) if home.path.exists() else []
    except OSError as error:
        raise from_os_error(error, "read", home.path) from None
    if home.endpoints_file.exists():
        raise LocalError(
            f"a `tidegate up` runs in {home.path}; stop it, and restore into another folder with --home",
            ExitCode.ALREADY_RUNNING,
        )
    if found:
        raise LocalError(
            f"{home.path} is not empty (it holds {', '.join(found[:3])}); restore into a new folder with --home",
            ExitCode.USAGE,
        )


def _clear(path: Path, fresh: bool) -> None:
    """Take away what a restore that failed had made in a folder that was empty."""
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
    if fresh:
        with contextlib.suppress(OSError):
            path.rmdir()


class _Address:
    """A running server."""

    def __init__(self, port: int, password: str) -> None:
        self.port = port
        self.password = password

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{self.password}@{ports.LOOPBACK}:{self.port}/{DATABASE}"


@contextmanager
def _database(home: Home) -> Iterator[_Address | EmbeddedPostgres]:
    """The home's server: the one that runs, or one started for as long as this takes."""
    server = EmbeddedPostgres(home.postgres)
    try:
        server.start()
    except LocalError as error:
        if error.code is not ExitCode.ALREADY_RUNNING:
            raise
        yield _running(home)
        return
    try:
        yield server
    finally:
        server.stop()


def _running(home: Home) -> _Address:
    """The server of a running stack, by what it wrote beside its data. Raises LocalError."""
    try:
        port = int((home.postgres / "postmaster.pid").read_text(encoding="utf-8").splitlines()[3])
        return _Address(port, (home.path / "pg.password").read_text(encoding="utf-8").strip())
    except (FileNotFoundError, IndexError, ValueError):
        raise LocalError(f"the PostgreSQL of {home.path} is starting or stopping; try again") from None
    except OSError as error:
        raise from_os_error(error, "read the running server's files of", home.postgres) from None


def _run(program: str, server: _Address | EmbeddedPostgres, arguments: Sequence[str], what: str) -> None:
    """One of PostgreSQL's own programs; the password travels in its environment, never in an argument."""
    path = binaries.postgres_folder() / program
    if not os.access(path, os.X_OK):
        raise LocalError(f"there is no runnable {program} in {path.parent}", ExitCode.MISSING)
    where = (f"--host={ports.LOOPBACK}", f"--port={server.port}", f"--username={USER}", "--no-password")
    environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "HOME": "/", "PGPASSWORD": server.password}
    try:
        done = subprocess.run(  # noqa: S603 - fixed argument list, no shell
            [path, *where, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LocalError(f"cannot {what} within {LONGEST_S:.0f} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        full = "No space left on device" in done.stderr
        reason = "the disk is full" if full else said[-1] if said else f"{program} ended with {done.returncode}"
        raise LocalError(f"cannot {what}: {reason}", ExitCode.DISK_FULL if full else ExitCode.FAILED)


def _revision(url: str) -> str:
    try:
        revision = migrate.current(Secret(url))
    except SQLAlchemyError as error:
        raise LocalError(f"cannot read the database: {type(error).__name__}", ExitCode.SERVICE_UNREACHABLE) from None
    if revision is None:
        raise LocalError("the database was never migrated, so there is nothing to back up", ExitCode.USAGE)
    return revision


@contextmanager
def _private_folder(beside: Path) -> Iterator[Path]:
    """A folder of ours alone on the disk where the result will be."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".tidegate-backup-", dir=beside))
    except OSError as error:
        raise from_os_error(error, "write to", beside, ExitCode.NO_PERMISSION) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
