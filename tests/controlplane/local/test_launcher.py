"""The process launcher: idempotent starts, epochs, a record that a successor can take over."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.fleet.launchers import process
from controlplane.fleet.launchers.base import LauncherError, ReplicaSpec, StaleEpochError
from controlplane.fleet.launchers.process import ProcessLauncher
from tests.controlplane.local import processes

SPEC = ReplicaSpec(
    replica="pool-0",
    pool="pool",
    model="smollm2",
    served_model="served",
    host="127.0.0.1",
    port=7310,
    control_url="http://127.0.0.1:7300",
    arguments=("--threads", "1"),
)


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher under test starts something cheaper than an engine."""
    sleeper: list[str | Path] = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(process, "command", lambda spec, home: sleeper)


@pytest.fixture
async def launcher(tmp_path: Path, sleeping: None) -> AsyncIterator[ProcessLauncher]:
    logs = tmp_path / "logs"
    logs.mkdir()
    launcher = ProcessLauncher(tmp_path, os.environ, logs)
    yield launcher
    launcher.stop_now("pool-0", epoch=1_000_000, grace=0.0)


def successor(tmp_path: Path) -> ProcessLauncher:
    return ProcessLauncher(tmp_path, os.environ, tmp_path / "logs")


async def test_a_repeated_start_starts_once(launcher: ProcessLauncher, tmp_path: Path) -> None:
    first = await launcher.start(SPEC, epoch=1, idempotency_key="a")
    second = await launcher.start(SPEC, epoch=1, idempotency_key="a")
    assert first == second
    assert processes.is_alive(int(first.handle))
    assert first.url == "http://127.0.0.1:7310"
    with pytest.raises(LauncherError, match="runs already"):
        await launcher.start(SPEC, epoch=1, idempotency_key="b")
    assert stat.S_IMODE((tmp_path / "replicas/pool-0/launch.json").stat().st_mode) == 0o600


async def test_an_older_epoch_is_refused(launcher: ProcessLauncher) -> None:
    launched = await launcher.start(SPEC, epoch=5, idempotency_key="a")
    with pytest.raises(StaleEpochError, match="epoch 4 is older than 5"):
        await launcher.stop("pool-0", epoch=4)
    with pytest.raises(StaleEpochError):
        await launcher.start(SPEC, epoch=4, idempotency_key="c")
    assert processes.is_alive(int(launched.handle))


async def test_stop_ends_it_and_the_list_says_so(launcher: ProcessLauncher) -> None:
    launched = await launcher.start(SPEC, epoch=1, idempotency_key="a")
    assert [each.running for each in await launcher.list()] == [True]
    await launcher.stop("pool-0", epoch=2)
    assert not processes.is_alive(int(launched.handle))
    assert [(each.running, each.epoch) for each in await launcher.list()] == [(False, 2)]
    await launcher.stop("pool-0", epoch=2)
    await launcher.stop("never-there", epoch=1)
    again = await launcher.start(SPEC, epoch=3, idempotency_key="b")
    assert processes.is_alive(int(again.handle))


async def test_a_successor_adopts_and_may_end_what_runs(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launched = await launcher.start(SPEC, epoch=1, idempotency_key="a")
    later = successor(tmp_path)
    adopted = await later.adopt("pool-0", epoch=7)
    assert (adopted.handle, adopted.epoch, adopted.running) == (launched.handle, 7, True)
    with pytest.raises(StaleEpochError):
        await launcher.stop("pool-0", epoch=1)
    await later.stop("pool-0", epoch=7)
    child = launcher.child("pool-0")
    assert child is not None
    assert child.wait(10.0) is not None
    with pytest.raises(LauncherError, match="does not run"):
        await later.adopt("pool-0", epoch=8)


async def test_a_reused_pid_is_not_taken_for_the_replica(launcher: ProcessLauncher, tmp_path: Path) -> None:
    await launcher.start(SPEC, epoch=1, idempotency_key="a")
    launcher.stop_now("pool-0", epoch=1, grace=5.0)
    record = tmp_path / "replicas/pool-0/launch.json"
    gone = next(iter(await launcher.list())).handle
    record.write_text(record.read_text().replace(f'"pid":{gone}', f'"pid":{os.getpid()}'))
    assert [each.running for each in await successor(tmp_path).list()] == [False]
    await successor(tmp_path).stop("pool-0", epoch=2)
    assert processes.is_alive(os.getpid())


def test_the_command_line_is_the_engines(tmp_path: Path) -> None:
    words = [str(word) for word in process.command(SPEC, tmp_path)]
    assert words[words.index("engine") :][:2] == ["engine", "serve"]
    flags = dict(zip(words[words.index("serve") + 1 :: 2], words[words.index("serve") + 2 :: 2], strict=True))
    assert flags == {
        "--replica": "pool-0",
        "--pool": "pool",
        "--model": "smollm2",
        "--served-model": "served",
        "--host": "127.0.0.1",
        "--port": "7310",
        "--control-url": "http://127.0.0.1:7300",
        "--home": str(tmp_path),
        "--threads": "1",
    }
