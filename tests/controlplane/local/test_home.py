"""The home folder: its lock, its secrets, its limits; and bounded logs."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from controlplane.local import logs, ports
from controlplane.local.errors import ExitCode, LocalError, from_os_error
from controlplane.local.files import write_private
from controlplane.local.home import Endpoints, Home, load_struct
from controlplane.local.ports import free_ports

ENDPOINTS = Endpoints(pid=1, started_at=2.0, control_url="a", gateway_url="b", replica_urls=["c"])


def test_one_supervisor_owns_a_home(tmp_path: Path) -> None:
    first, second = Home(tmp_path / "home"), Home(tmp_path / "home")
    first.open()
    with pytest.raises(LocalError, match=f"in use by process {os.getpid()}") as refused:
        second.open()
    assert refused.value.code is ExitCode.ALREADY_RUNNING
    first.close()
    second.open()
    second.close()


def test_secrets_are_made_once_and_only_the_owner_reads_them(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.open()
    first = home.secret("internal")
    assert len(first.reveal()) >= 32
    assert Home(tmp_path / "home").secret("internal") == first
    assert home.secret("session") != first
    assert stat.S_IMODE((home.path / "internal.secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) & 0o066 == 0
    home.close()


def test_endpoints_are_there_while_it_runs_only(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.open()
    home.publish(ENDPOINTS)
    assert home.endpoints() == ENDPOINTS
    home.close()
    assert home.endpoints() is None


def test_a_nearly_full_disk_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10 * 2**20))
    with pytest.raises(LocalError, match=r"10 MiB free.*the disk is full") as refused:
        Home(tmp_path / "home").open()
    assert refused.value.code is ExitCode.DISK_FULL


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LocalError, match="no write permission; pass --home") as refused:
        Home(tmp_path / "home").open()
    assert refused.value.code is ExitCode.NO_PERMISSION


def test_a_home_below_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="cannot create the folder") as refused:
        Home(tmp_path / "file" / "home").open()
    assert refused.value.code is ExitCode.NO_PERMISSION


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "admin.json").write_text('{"email": ')
    with pytest.raises(LocalError, match=r"admin\.json is damaged.*move it away") as refused:
        load_struct(tmp_path / "admin.json", Endpoints)
    assert refused.value.code is ExitCode.DAMAGED


@pytest.mark.parametrize("content", [b"\xff\xfe", b"short\n"])
def test_a_secret_that_cannot_be_one_is_named_and_stays(tmp_path: Path, content: bytes) -> None:
    home = Home(tmp_path)
    (tmp_path / "internal.secret").write_bytes(content)
    with pytest.raises(LocalError, match=r"internal\.secret is damaged"):
        home.secret("internal")
    assert (tmp_path / "internal.secret").read_bytes() == content


def test_what_may_not_be_read_is_not_said_to_lack_write_permission() -> None:
    said = from_os_error(PermissionError(errno.EACCES, "Permission denied"), "read", Path("/x/admin.json"))
    assert said.message.startswith("cannot read /x/admin.json: no read permission")
    assert "write" not in said.message
    assert said.code is ExitCode.NO_PERMISSION


def test_a_replaced_private_file_was_never_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_is_cut_in_place_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, b"x" * 100)
        assert not logs.bound(log, max_bytes=100)
        os.write(descriptor, b"y")
        assert logs.bound(log, max_bytes=100)
        os.write(descriptor, b"after\n")
        assert log.read_bytes() == b"after\n"
        assert log.with_name("gateway.log.1").read_bytes() == b"x" * 100 + b"y"
    finally:
        os.close(descriptor)


def test_the_last_line_is_that_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("of yesterday\n")
    assert logs.last_line(log, log.stat().st_size) == ""
    with log.open("a") as stream:
        stream.write("first\nlast words\n\n")
    assert logs.last_line(log, len("of yesterday\n")) == "last words"
    assert logs.last_line(tmp_path / "absent") == ""


def test_free_ports_differ_and_can_be_bound() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(ports.is_free(port) for port in found)


def test_a_foreign_host_is_named() -> None:
    with pytest.raises(LocalError, match=r"--host 192\.0\.2\.1 is not an address of this machine"):
        ports.is_free(7300, "192.0.2.1")


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, ExitCode.DISK_FULL, "the disk is full"),
        (errno.EDQUOT, ExitCode.DISK_FULL, "the disk is full"),
        (errno.EACCES, ExitCode.NO_PERMISSION, "no write permission"),
        (errno.EROFS, ExitCode.NO_PERMISSION, "no write permission"),
        (errno.EIO, ExitCode.START_FAILED, "Input/output error"),
    ],
)
def test_what_the_system_refuses_becomes_a_sentence(number: int, code: ExitCode, words: str, tmp_path: Path) -> None:
    told = from_os_error(OSError(number, os.strerror(number)), "write", tmp_path)
    assert told.code is code
    assert told.message.startswith(f"cannot write {tmp_path}: ")
    assert words in told.message
