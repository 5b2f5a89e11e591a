"""`tidegate up` and `tidegate doctor` at the terminal: one sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from controlplane.local import binaries
from controlplane.local.errors import ExitCode
from controlplane.local.interrupts import TOGETHER_S
from tests.controlplane.local.processes import carrying, wait_until


def tidegate(*arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "controlplane", *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], code: ExitCode) -> str:
    """The one sentence on standard error."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return lines[0]


def test_a_port_in_use_names_the_port_and_the_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = tidegate("up", "--home", tmp_path / "home", "--free-ports", "--port-gateway", str(port))
    sentence = refused(done, ExitCode.PORT_IN_USE)
    assert f"port {port} for the gateway is in use" in sentence
    assert "--port-gateway" in sentence


def test_one_port_for_two_services_is_refused_with_both_flags(tmp_path: Path) -> None:
    same = ("--port-control", "7301", "--port-gateway", "7301")
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports", *same)
    sentence = refused(done, ExitCode.USAGE)
    assert "--port-control and --port-gateway are both 7301" in sentence
    done = tidegate("up", "--home", tmp_path / "home", "--port-gateway", "7332")
    assert "--port-gateway and --port-postgres are both 7332" in refused(done, ExitCode.USAGE)
    assert not (tmp_path / "home").exists()


@contextmanager
def starting(home: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A `tidegate up` that has just been told to start, and what it says; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "controlplane", "up", "--home", home, "--free-ports", "--no-replica"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout
        finally:
            process.kill()


def test_signals_at_once_are_one_request_for_an_orderly_stop(tmp_path: Path) -> None:
    """As from `timeout make up`: it tells the group, and make tells its child again."""
    with starting(tmp_path / "home") as (process, lines):
        assert any("PostgreSQL" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.03)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.OK, said
    assert "PostgreSQL                stopping" in said
    assert "Aborted" not in said


def test_a_second_ctrl_c_kills_what_takes_its_time(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with starting(home) as (process, lines):
        assert any("Valkey" in line for line in lines)
        (valkey,) = (one for one in psutil.Process(process.pid).children() if "valkey" in one.name())
        valkey.suspend()  # it hears no request to end
        process.send_signal(signal.SIGINT)
        assert any("stopping" in line for line in lines)
        time.sleep(1.1 * TOGETHER_S)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert wait_until(lambda: not valkey.is_running()), "what did not end was left"
    assert wait_until(lambda: not carrying(str(home))), carrying(str(home))


@pytest.mark.parametrize("host", ["localhost", "not an address", "300.1.2.3", ""])
def test_a_host_that_is_no_ip_address_is_refused_before_anything_starts(tmp_path: Path, host: str) -> None:
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports", "--host", host)
    assert f"--host {host!r} is not an IP address" in refused(done, ExitCode.USAGE)
    assert not (tmp_path / "home").exists()


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports", "--host", "192.0.2.1")
    assert "--host 192.0.2.1 is not an address of this machine" in refused(done, ExitCode.USAGE)


def test_a_broken_database_url_is_named_without_its_password(tmp_path: Path) -> None:
    given = {"DATABASE_URL": "postgresql://u:s3cret-canary@127.0.0.1:1/d"}
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports", environment=given)
    assert "DATABASE_URL (127.0.0.1:1/d) cannot be used" in refused(done, ExitCode.SERVICE_UNREACHABLE)
    assert "s3cret-canary" not in done.stdout + done.stderr


def test_data_of_another_postgres_major_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "home" / "pg"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("16\n")
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports")
    assert "was made by PostgreSQL 16" in refused(done, ExitCode.DATA_VERSION)
    assert "stopping" not in done.stdout  # nothing was started


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file" / "home", Path("/proc/tidegate-home")):
        done = tidegate("up", "--home", home, "--free-ports")
        assert f"cannot create the folder {home}" in refused(done, ExitCode.NO_PERMISSION)


@pytest.mark.parametrize("name", ["admin.json", "demo.json", "internal.secret"])
def test_a_damaged_file_is_named_before_anything_starts(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / name).write_bytes(b"{\xff")
    done = tidegate("up", "--home", home, "--free-ports")
    assert f"{home / name} is damaged" in refused(done, ExitCode.DAMAGED)
    assert done.stdout == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports")
    assert "no write permission" in refused(done, ExitCode.NO_PERMISSION)


def test_an_unknown_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports", "--model", "no-such-model")
    assert "--model no-such-model" in refused(done, ExitCode.USAGE)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TIDEGATE_MAX_IN_FLIGHT", "many", "TIDEGATE_MAX_IN_FLIGHT='many' is not valid"),
        ("TIDEGATE_STALE_AFTER_S", "60", "TIDEGATE_STALE_AFTER_S=60 is not valid"),
        ("TIDEGATE_SESSION_SECRET", "letmein", "TIDEGATE_SESSION_SECRET must have at least 16 characters"),
        ("DATABASE_URL", "nonsense", "DATABASE_URL is not a URL"),
        ("REDIS_URL", "nonsense", "REDIS_URL is not a URL"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_starts(tmp_path: Path, name: str, value: str, said: str) -> None:
    done = tidegate("up", "--home", tmp_path / "home", "--free-ports", environment={name: value})
    assert said in refused(done, ExitCode.USAGE)
    assert done.stdout == ""
    assert not (tmp_path / "home").exists()


def test_the_end_of_a_process_collects_nothing() -> None:
    """What was imported is set aside before the interpreter's last collection, so that a stop takes no extra second."""
    script = """
import atexit, gc
atexit.register(lambda: print("set aside", gc.get_freeze_count()))
from controlplane.cli import main
main(["tenant", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout.rsplit("set aside", 1)[1]) > 10_000


def test_the_help_documents_every_exit_code() -> None:
    text = tidegate("up", "--help").stdout
    for code in ExitCode:
        assert f"{int(code):>5}  " in text, code


def test_doctor_finds_this_machine_and_says_what_is_wrong(tmp_path: Path) -> None:
    given = {"DATABASE_URL": "postgresql://u:s3cret-canary@127.0.0.1:1/d"}
    done = tidegate("doctor", "--json", "--home", tmp_path / "home", environment=given)
    assert done.returncode == ExitCode.FAILED
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert "nothing listens there" in found["PostgreSQL"]["wrong"]
    assert "unset it" in found["PostgreSQL"]["remedy"]
    assert "s3cret-canary" not in done.stdout
    assert found["torch"]["found"].startswith("2.")
    assert found["attention backend"]["found"] != "none"
    assert found["CPU kernels"]["found"].endswith("; smollm2 runs captured, weights in blocks")
    assert not found["CPU kernels"]["wrong"]
    assert "cpu" in found["devices"]["found"]
    assert found["demo model"]["found"].split(",")[0].endswith(".gguf")
    assert binaries.program_version(binaries.valkey_server()) in found["Redis"]["found"]
    assert not found["Python"]["wrong"]


def test_doctor_says_why_there_are_no_kernels(tmp_path: Path) -> None:
    given = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = tidegate("doctor", "--json", "--home", tmp_path / "home", environment=given)
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}["CPU kernels"]
    assert found["found"] == (
        "none, so that steps are run by torch: no C++ compiler was found (no-such-compiler); "
        "smollm2 runs eager, weights in float32"
    )
    assert not found["wrong"], "the engine runs without them"


def test_doctor_finds_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "endpoints.json").write_text("{")
    done = tidegate("doctor", "--json", "--home", tmp_path)
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert "endpoints.json is damaged" in found["ports"]["wrong"]


def test_doctor_prints_the_remedy_beside_what_is_wrong(tmp_path: Path) -> None:
    done = tidegate("doctor", "--home", tmp_path / "home", environment={"PG_BIN_DIR": str(tmp_path)})
    assert done.returncode == ExitCode.FAILED
    assert "PG_BIN_DIR has no runnable postgres" in done.stdout
    assert "→ Set DATABASE_URL instead." in done.stdout
