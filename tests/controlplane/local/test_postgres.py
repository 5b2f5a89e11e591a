"""The embedded PostgreSQL as a newcomer and an outage meet it."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from controlplane.local import binaries
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.ports import free_ports
from controlplane.local.postgres import EmbeddedPostgres
from tests.controlplane.local import processes

START_AND_WAIT = """
import sys
from pathlib import Path
from controlplane.local.postgres import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
server.start()
print(server.child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised folder, below a folder that only its owner may enter."""
    private = tmp_path_factory.mktemp("private")
    private.chmod(0o700)
    server = EmbeddedPostgres(private / "pg")
    server.start()
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept (row int)")
        connection.execute("INSERT INTO kept VALUES (7)")
    server.stop()
    return private / "pg"


@pytest.fixture
def server(seed: Path) -> Iterator[EmbeddedPostgres]:
    """A started server over the initialised folder."""
    server = EmbeddedPostgres(seed)
    server.start()
    yield server
    server.stop()


def rows(server: EmbeddedPostgres) -> list[int]:
    with psycopg.connect(server.url) as connection:
        return [row[0] for row in connection.execute("SELECT row FROM kept").fetchall()]


def test_keeps_rows_and_password_across_starts(seed: Path) -> None:
    first, second = EmbeddedPostgres(seed), EmbeddedPostgres(seed)
    for server in (first, second):
        server.start()
        assert rows(server) == [7]
        server.stop()
    assert first.password == second.password


def test_asks_for_a_password_and_checks_pages(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url) as connection:
        assert connection.execute("SHOW data_checksums").fetchone() == ("on",)
        assert connection.execute("SHOW password_encryption").fetchone() == ("scram-sha-256",)
    wrong = server.url.replace(server.password, "wrong")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong, connect_timeout=5)


def test_a_folder_for_sockets_among_the_temporary_files_goes_with_the_server(seed: Path, tmp_path: Path) -> None:
    distant = tmp_path / ("long" * 30)
    distant.symlink_to(seed.parent)
    server = EmbeddedPostgres(distant / "pg")
    server.start()
    with psycopg.connect(server.url) as connection:
        found = connection.execute("SHOW unix_socket_directories").fetchone()
    assert found is not None
    folder = Path(found[0])
    assert distant not in folder.parents
    assert folder.is_dir()
    server.stop()
    assert not folder.exists()


def test_answers_on_a_unix_socket_in_a_short_path(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url) as connection:
        found = connection.execute("SHOW unix_socket_directories").fetchone()
    assert found is not None
    path = Path(found[0]) / f".s.PGSQL.{server.port}"
    assert len(str(path)) <= 107
    with psycopg.connect(f"{server.url}?host={found[0]}") as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_secrets_are_readable_by_the_owner_only(server: EmbeddedPostgres, seed: Path) -> None:
    password = seed.with_name("pg.password")
    assert stat.S_IMODE(password.stat().st_mode) == 0o600
    assert stat.S_IMODE(seed.stat().st_mode) == 0o700
    assert server.child is not None
    assert server.password.encode() not in Path(f"/proc/{server.child.pid}/cmdline").read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_as_root_it_runs_as_an_unprivileged_user_below_a_private_folder(server: EmbeddedPostgres, seed: Path) -> None:
    """The folder above is mode 700 and root's: the server must still reach its data, and not be root."""
    assert server.child is not None
    assert stat.S_IMODE(seed.parent.stat().st_mode) == 0o700
    status = Path(f"/proc/{server.child.pid}/status").read_text()
    uid = int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[2])
    assert uid == seed.stat().st_uid != 0
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    assert effective == 1 << 1, "only the capability to pass private folders is kept"
    assert seed.parent.stat().st_uid == 0, "the private folder was not given away"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_as_root_without_a_private_folder_no_capability_is_kept(seed: Path) -> None:
    seed.parent.chmod(0o711)
    base = seed.parents[1]
    before = [(folder, stat.S_IMODE(folder.stat().st_mode)) for folder in (base, base.parent)]
    try:
        for folder, _ in before:
            folder.chmod(0o711)
        server = EmbeddedPostgres(seed)
        server.start()
        assert server.child is not None
        status = Path(f"/proc/{server.child.pid}/status").read_text()
        server.stop()
    finally:
        seed.parent.chmod(0o700)
        for folder, mode in before:
            folder.chmod(mode)
    assert "CapEff:\t0000000000000000" in status


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_programs_below_a_private_folder_are_reached(
    seed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment under /root: the programs themselves cannot be reached by the server's user."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    package = binaries.postgres_folder().parents[1]
    subprocess.run(["cp", "-r", package, package.with_name(f"{package.name}.libs"), private], check=True)
    monkeypatch.setenv("PG_BIN_DIR", str(private / package.name / "pginstall" / "bin"))
    fresh = EmbeddedPostgres(tmp_path / "pg")
    fresh.start()
    assert fresh.child is not None
    assert str(private).encode() in Path(f"/proc/{fresh.child.pid}/cmdline").read_bytes()
    fresh.stop()


def test_recovers_after_its_own_processes_were_killed(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url) as connection:
        connection.execute("INSERT INTO kept VALUES (8)")
    assert server.child is not None
    os.kill(server.child.pid, signal.SIGKILL)
    assert server.child.wait(10.0) == -signal.SIGKILL
    server.stop()
    assert processes.wait_until(lambda: not processes.carrying(f"-D\0{server.data}"))
    server.start()
    assert rows(server) == [7, 8]
    with psycopg.connect(server.url) as connection:
        connection.execute("DELETE FROM kept WHERE row = 8")


def test_a_killed_parent_leaves_no_server_and_the_next_start_keeps_every_row(seed: Path) -> None:
    with processes.python(START_AND_WAIT, str(seed)) as parent:
        pid = int(processes.read_line(parent))
        assert processes.is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert processes.wait_until(lambda: not processes.is_alive(pid))
    again = EmbeddedPostgres(seed)
    again.start()
    assert rows(again) == [7]
    again.stop()


def test_a_server_left_over_from_a_killed_run_is_ended_not_joined(seed: Path) -> None:
    folder, owner = binaries.postgres_folder(), seed.stat()
    as_owner = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    if as_owner:  # this leftover was started without the shim, so the way must be open for it
        for private in (seed.parent, *list(seed.parents)[1:3]):
            private.chmod(0o711)
    (port,) = free_ports(1)
    settings = ["-c", f"port={port}", "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
    leftover = subprocess.Popen([folder / "postgres", "-D", seed, *settings], cwd="/", **as_owner)
    try:
        assert processes.wait_until((seed / "postmaster.pid").exists)
        server = EmbeddedPostgres(seed)
        server.start()
        assert leftover.wait(10) == 0, "it was asked to shut down, not killed"
        assert rows(server) == [7]
        server.stop()
    finally:
        leftover.kill()
        leftover.wait()
        seed.parent.chmod(0o700)


def test_a_recorded_pid_that_is_somebody_elses_now_is_no_obstacle(seed: Path) -> None:
    (seed / "postmaster.pid").write_text(f"{os.getppid()}\n{seed}\n0\n1\n\n\n\n\n")
    owner = seed.stat()
    os.chown(seed / "postmaster.pid", owner.st_uid, owner.st_gid)
    server = EmbeddedPostgres(seed)
    server.start()
    assert rows(server) == [7]
    server.stop()
    assert processes.is_alive(os.getppid())


def test_two_servers_over_one_folder_are_refused(server: EmbeddedPostgres, seed: Path) -> None:
    with pytest.raises(LocalError, match=f"is in use by process {os.getpid()}") as refused:
        EmbeddedPostgres(seed).start()
    assert refused.value.code is ExitCode.ALREADY_RUNNING
    assert rows(server) == [7]


def test_a_port_in_use_is_named(seed: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LocalError, match=rf"port {port} for PostgreSQL is in use.*--port-postgres") as refused:
            EmbeddedPostgres(seed, port).start()
    assert refused.value.code is ExitCode.PORT_IN_USE


def test_data_of_another_major_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    data = tmp_path / "pg"
    data.mkdir(mode=0o700)
    (data / "PG_VERSION").write_text("16\n")
    with pytest.raises(LocalError, match=r"made by PostgreSQL 16 and this is PostgreSQL \d+.*PG_BIN_DIR") as refused:
        EmbeddedPostgres(data).start()
    assert refused.value.code is ExitCode.DATA_VERSION
    assert list(data.iterdir()) == [data / "PG_VERSION"], "the folder was left alone"


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    data = tmp_path / "pg"
    data.mkdir()
    (data / "thesis.txt").write_text("precious")
    with pytest.raises(LocalError, match="is not empty and holds no PostgreSQL data"):
        EmbeddedPostgres(data).start()
    assert (data / "thesis.txt").read_text() == "precious"


def test_an_interrupted_first_start_is_begun_again(tmp_path: Path) -> None:
    half = tmp_path / "pg.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    server = EmbeddedPostgres(tmp_path / "pg")
    server.start()
    with psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("tidegate",)
    server.stop()
    assert not half.exists()


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_BIN_DIR", str(tmp_path))
    with pytest.raises(LocalError, match="PG_BIN_DIR has no runnable postgres") as refused:
        EmbeddedPostgres(tmp_path / "pg").start()
    assert refused.value.code is ExitCode.MISSING


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LocalError, match="no write permission") as refused:
        EmbeddedPostgres(tmp_path / "pg").start()
    assert refused.value.code is ExitCode.NO_PERMISSION


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tidegate-test", small]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounting")
    try:
        with pytest.raises(LocalError, match="the disk is full") as refused:
            EmbeddedPostgres(small / "pg").start()
        assert refused.value.code is ExitCode.DISK_FULL
        assert not (small / "pg.new").exists(), "the half-made folder is gone"
    finally:
        subprocess.run(["umount", small], check=True)


def test_as_root_an_existing_unprivileged_user_is_chosen(tmp_path: Path) -> None:
    chosen = binaries.os_user(tmp_path / "new")
    if os.geteuid() == 0:
        assert chosen is not None
        assert pwd.getpwnam(chosen).pw_uid != 0
    else:
        assert chosen is None
