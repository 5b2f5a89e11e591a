"""The embedded Valkey keeps what it accepted, evicts nothing and lets nobody in without the password."""

from __future__ import annotations

import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controlplane.local import binaries
from controlplane.local.child import spawn
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.valkey import EmbeddedValkey
from tests.controlplane.local import processes

START_AND_WAIT = """
import sys
from pathlib import Path
from controlplane.local.valkey import EmbeddedValkey
server = EmbeddedValkey(Path(sys.argv[1]))
server.start()
print(server.child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey", max_memory="4mb")
    server.start()
    yield server
    server.stop()


def client(server: EmbeddedValkey) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def test_a_full_store_refuses_instead_of_evicting(server: EmbeddedValkey) -> None:
    with client(server) as store:
        store.set("lease", "held")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for number in range(10_000):
                store.set(f"filler-{number}", "x" * 4096)
        assert store.get("lease") == b"held"


def test_asks_for_the_password(server: EmbeddedValkey) -> None:
    with redis.Redis(host="127.0.0.1", port=server.port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    configuration = server.directory / "valkey.conf"
    assert stat.S_IMODE(configuration.stat().st_mode) == 0o600
    assert server.child is not None
    assert server.password.encode() not in Path(f"/proc/{server.child.pid}/cmdline").read_bytes()


def test_keeps_what_was_written_when_killed(server: EmbeddedValkey) -> None:
    with client(server) as store:
        store.set("kept", "yes")
        store.waitaof(1, 0, 2000)
    assert server.child is not None
    server.child.send(signal.SIGKILL)
    server.child.wait(10.0)
    server.stop()
    server.start()
    with client(server) as store:
        assert store.get("kept") == b"yes"


def test_a_killed_parent_leaves_no_server(tmp_path: Path) -> None:
    with processes.python(START_AND_WAIT, str(tmp_path / "valkey")) as parent:
        pid = int(processes.read_line(parent))
        assert processes.is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert processes.wait_until(lambda: not processes.is_alive(pid))


def test_a_server_left_over_from_a_killed_run_is_ended_first(server: EmbeddedValkey, tmp_path: Path) -> None:
    """Two servers appending to one log would ruin it."""
    with client(server) as store:
        store.set("kept", "yes")
    server.stop()
    user = binaries.os_user(server.directory)
    command = [binaries.valkey_server(), server.directory / "valkey.conf"]
    reach = [server.directory, binaries.valkey_server()]
    leftover = spawn(
        "leftover", command, log=tmp_path / "leftover.log", environment={}, cwd=Path("/"), user=user, reach=reach
    )
    assert processes.wait_until(lambda: b"127.0.0.1" in Path(f"/proc/{leftover.pid}/cmdline").read_bytes())
    assert processes.wait_until((server.directory / "valkey.pid").exists)
    server.start()
    assert leftover.wait(10.0) == 0
    leftover.close()
    with client(server) as store:
        assert store.get("kept") == b"yes"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LocalError, match=rf"port {port} for Valkey is in use.*--port-valkey") as refused:
            EmbeddedValkey(tmp_path / "valkey", port).start()
    assert refused.value.code is ExitCode.PORT_IN_USE
