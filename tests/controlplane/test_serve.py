"""The processes: they serve, say in one sentence why not, stop in time, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from controlplane.migrate import head
from controlplane.settings import Settings
from tests.services import Databases, free_port

CHECKOUT = Path(__file__).parents[2]
START_S = 90.0


def environment(settings: Settings | None, **more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "DATABASE_", "REDIS_"))
    }
    if settings is not None:
        kept |= {
            "DATABASE_URL": settings.database_url.reveal(),
            "REDIS_URL": settings.redis_url.reveal(),
            "TIDEGATE_HOME": str(settings.home),
            "TIDEGATE_INTERNAL_TOKEN": settings.internal_token.reveal(),
            "TIDEGATE_SESSION_SECRET": settings.session_secret.reveal(),
        }
    return kept | {"PYTHONPATH": str(CHECKOUT)} | more


def tidegate(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, from a folder that holds nothing of ours."""
    command = [sys.executable, "-m", "controlplane", *arguments]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def serving(role: str, settings: Settings, **more: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A `tidegate serve` that answers /healthz, and its port; whatever is left of it is killed."""
    port = free_port()
    command = [sys.executable, "-m", "controlplane", "serve", role, "--port", str(port)]
    settings.home.mkdir(parents=True, exist_ok=True)
    with (settings.home / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(settings, **more), cwd="/", stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not answers(port):
            said = (settings.home / f"{role}.log").read_text()
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        yield process, port
    finally:
        for left in [*children(process.pid), process.pid]:
            if psutil.pid_exists(left):
                os.kill(left, signal.SIGKILL)
        process.wait(10)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize("role", ["control", "gateway"])
def test_kill_9_of_a_server_leaves_nothing_behind_and_its_port_free(settings: Settings, role: str) -> None:
    with serving(role, settings) as (process, port):
        assert children(process.pid) == []
        with socket.create_connection(("127.0.0.1", port)):
            process.kill()
            process.wait(10)
        assert not answers(port)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def test_a_server_stops_on_sigterm_while_a_connection_is_open(settings: Settings) -> None:
    with serving("control", settings) as (process, port), socket.create_connection(("127.0.0.1", port)) as held:
        held.sendall(b"POST /api/v1/tenants HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf a body")
        process.terminate()
        assert process.wait(30) == 0


def test_a_server_logs_json_lines_without_the_secrets_it_was_given(settings: Settings) -> None:
    with serving("control", settings) as (process, port):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/v1/me", headers={"authorization": "Bearer tga_canarycanarycanary"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 401
        refused.value.close()
        process.terminate()
        process.wait(30)
    lines = (settings.home / "control.log").read_text().splitlines()
    assert lines
    assert all(line.startswith('{"ts": ') for line in lines), lines
    said = "\n".join(lines)
    for secret in (settings.internal_token, settings.session_secret):
        assert secret.reveal() not in said
    assert "canarycanary" not in said


def test_a_port_in_use_is_one_sentence(settings: Settings) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        done = tidegate("serve", "gateway", "--port", port, env=environment(settings))
    assert done.returncode == 3
    assert done.stderr == f"tidegate: cannot listen on 127.0.0.1:{port}: Address already in use; pass another --port\n"


@pytest.mark.parametrize("command", [("serve", "control"), ("worker",)])
def test_a_missing_setting_is_named(command: tuple[str, ...]) -> None:
    done = tidegate(*command, env=environment(None))
    assert (done.returncode, done.stderr) == (2, "tidegate: DATABASE_URL is not set\n")


def test_a_secret_that_can_be_guessed_is_refused_without_printing_it(settings: Settings) -> None:
    done = tidegate("serve", "control", env=environment(settings, TIDEGATE_SESSION_SECRET="letmein"))
    assert (done.returncode, done.stderr) == (2, "tidegate: TIDEGATE_SESSION_SECRET must have at least 16 characters\n")


def test_a_wrong_setting_is_named(settings: Settings) -> None:
    done = tidegate("serve", "control", env=environment(settings, TIDEGATE_MAX_IN_FLIGHT="many"))
    assert done.returncode == 2
    assert done.stderr.startswith("tidegate: TIDEGATE_MAX_IN_FLIGHT='many' is not valid")
    done = tidegate("serve", "control", env=environment(settings, TIDEGATE_LOG_LEVEL="LOUD"))
    wanted = "it must be one of CRITICAL, ERROR, WARNING, INFO, DEBUG"
    assert (done.returncode, done.stderr) == (2, f"tidegate: TIDEGATE_LOG_LEVEL='LOUD' is not valid: {wanted}\n")


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("localhost", "--host 'localhost' is not an IP address such as 127.0.0.1 or 0.0.0.0"),
        ("nonsense here", "--host 'nonsense here' is not an IP address such as 127.0.0.1 or 0.0.0.0"),
        ("192.0.2.1", "--host 192.0.2.1 is not an address of this machine"),
    ],
)
def test_a_host_that_cannot_be_listened_on_is_refused(settings: Settings, host: str, sentence: str) -> None:
    done = tidegate("serve", "gateway", "--host", host, "--port", str(free_port()), env=environment(settings))
    assert (done.returncode, done.stderr) == (2, f"tidegate: {sentence}\n")


def test_the_database_is_migrated_from_anywhere_and_a_second_time_changes_nothing(postgres: Databases) -> None:
    env = environment(None, DATABASE_URL=postgres.create("cli"))
    before = tidegate("db", "current", env=env)
    assert before.returncode == 1
    assert "run `tidegate db upgrade`" in before.stderr
    done = tidegate("db", "upgrade", env=env)
    assert (done.returncode, done.stdout) == (0, f"the schema is at {head()} (was empty)\n")
    again = tidegate("db", "upgrade", env=env)
    assert (again.returncode, again.stdout) == (0, f"the schema is at {head()}\n")
    assert tidegate("db", "current", env=env).returncode == 0


@pytest.mark.parametrize(
    ("url", "code", "sentence"),
    [
        ("postgresql://u:hidden-password@127.0.0.1:1/x", 6, "cannot use the database of DATABASE_URL"),
        ("not a url", 2, "DATABASE_URL is not a URL"),
    ],
)
def test_a_broken_database_url_is_one_sentence_without_the_password(url: str, code: int, sentence: str) -> None:
    done = tidegate("db", "upgrade", env=environment(None, DATABASE_URL=url))
    assert done.returncode == code
    assert done.stderr.startswith(f"tidegate: {sentence}")
    assert done.stderr.count("\n") == 1
    assert "hidden-password" not in done.stderr
