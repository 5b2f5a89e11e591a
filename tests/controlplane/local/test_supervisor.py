"""Keeping units alive: restart with backoff, crash loops, order, and being interrupted."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.process import ProcessSpec, ProcessUnit
from controlplane.local.supervisor import LOOPING_AFTER, Supervisor, restart_delay
from tests.controlplane.local import processes

SLEEP = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"


class Recorder:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.delays: list[float] = []
        self.said = ""

    def starting(self, name: str) -> None:
        self.events.append(("starting", name))

    def ready(self, name: str, seconds: float) -> None:
        self.events.append(("ready", name))

    def ended(self, name: str, how: str, restart_in: float) -> None:
        self.events.append((how, name))
        self.delays.append(restart_in)

    def looping(self, name: str, line: str) -> None:
        self.events.append(("looping", name))
        self.said = line

    def stopping(self, name: str) -> None:
        self.events.append(("stopping", name))

    def trouble(self, name: str, message: str) -> None:
        self.events.append((message, name))


class Stage:
    """A supervisor, what it told, and units for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorder = Recorder()
        self.supervisor = Supervisor(self.recorder, random.Random(1))

    def unit(self, name: str, code: str = SLEEP, **spec: object) -> ProcessUnit:
        values: dict[str, object] = {"ready": lambda: True, "ready_within": 10.0, **spec}
        environment = {**os.environ, **self.supervisor.environment}
        return ProcessUnit(
            ProcessSpec(
                name=name,
                command=[sys.executable, "-c", code],
                environment=environment,
                log=self.folder / f"{name}.log",
                cwd=self.folder,
                **values,  # type: ignore[arg-type]  # the test's own overrides
            )
        )

    def turn_until(self, event: tuple[str, str], count: int = 1) -> None:
        assert processes.wait_until(lambda: self.supervisor.turn(0.05) or self.recorder.events.count(event) >= count)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.supervisor.stop()


def test_a_killed_unit_is_started_again(stage: Stage) -> None:
    stage.supervisor.launch([stage.unit("one")])
    first = stage.supervisor.pids()["one"]
    os.kill(first, signal.SIGKILL)
    stage.turn_until(("ready", "one"), count=2)
    second = stage.supervisor.pids()["one"]
    assert second != first
    assert processes.is_alive(second)
    assert ("was killed by signal 9", "one") in stage.recorder.events
    assert stage.supervisor.stop()
    assert not processes.is_alive(second)


def test_units_stop_in_the_given_order_then_the_youngest_first(stage: Stage) -> None:
    stage.supervisor.launch([stage.unit(name) for name in ("store", "writer", "front", "helper")])
    stage.supervisor.stop(["front", "writer"])
    stopped = [name for event, name in stage.recorder.events if event == "stopping"]
    assert stopped == ["front", "writer", "helper", "store"]


def test_an_early_unit_ends_beside_the_others_and_is_asked_once(stage: Stage) -> None:
    """`front` ends only after it has seen `slow` get its signal; `slow` would end with 7 on a second one."""
    asked = stage.folder / "asked"
    slow = f"""
import pathlib, signal, sys, time
def heard(*_):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    pathlib.Path({str(asked)!r}).touch()
    time.sleep(0.5)
    print("orderly", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, heard)
print("armed", flush=True)
signal.pause()
"""
    front = f"""
import pathlib, signal, sys, time
def heard(*_):
    while not pathlib.Path({str(asked)!r}).exists():
        time.sleep(0.01)
    print("orderly", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, heard)
print("armed", flush=True)
signal.pause()
"""
    stage.supervisor.launch([stage.unit("store"), stage.unit("slow", slow), stage.unit("front", front, grace=8.0)])
    logs = [stage.folder / "slow.log", stage.folder / "front.log"]
    assert processes.wait_until(lambda: all("armed" in log.read_text() for log in logs))
    assert stage.supervisor.stop(["front", "slow"], early=["slow"])
    assert all(log.read_text() == "armed\norderly\n" for log in logs)
    stopped = [name for event, name in stage.recorder.events if event == "stopping"]
    assert stopped == ["front", "slow", "store"]


def test_a_unit_that_ends_while_starting_fails_the_start_with_its_last_words(stage: Stage) -> None:
    broken = stage.unit(
        "broken", "print('the model file is torn', flush=True); raise SystemExit(3)", ready=lambda: False
    )
    with pytest.raises(LocalError, match=r"broken did not start.*the model file is torn") as failed:
        stage.supervisor.launch([broken])
    assert failed.value.code is ExitCode.START_FAILED
    stage.supervisor.stop()


def test_a_unit_that_never_becomes_ready_fails_the_start(stage: Stage) -> None:
    with pytest.raises(LocalError, match="silent did not start"):
        stage.supervisor.launch([stage.unit("silent", ready=lambda: False, ready_within=0.3)])
    stage.supervisor.stop()
    assert not processes.carrying(stage.supervisor.mark)


def test_a_crash_loop_is_told_once_and_slowed_down(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.local.supervisor.FIRST_RESTART_S", 0.001)
    monkeypatch.setattr("controlplane.local.supervisor.LONGEST_RESTART_S", 0.001)
    switch = stage.folder / "broken"
    code = f"import pathlib, signal\nif pathlib.Path({str(switch)!r}).exists(): raise SystemExit('no licence')\n{SLEEP}"
    stage.supervisor.launch([stage.unit("loop", code)])
    switch.touch()
    os.kill(stage.supervisor.pids()["loop"], signal.SIGKILL)
    stage.turn_until(("looping", "loop"))
    assert stage.recorder.events.count(("looping", "loop")) == 1
    assert stage.recorder.said == "no licence"
    assert stage.recorder.delays[-1] > 30.0
    stage.supervisor.stop()


def test_delays_double_are_jittered_and_bounded() -> None:
    rng = random.Random(3)
    means = [sum(restart_delay(n, rng) for _ in range(400)) / 400 for n in range(1, LOOPING_AFTER)]
    for shorter, longer in itertools.pairwise(means):
        assert longer == pytest.approx(2 * shorter, rel=0.1)
    assert len({restart_delay(3, rng) for _ in range(10)}) == 10
    assert max(restart_delay(n, rng) for n in range(1, 2000)) <= 60.0 * 1.3


def test_a_second_interrupt_kills_what_does_not_stop(stage: Stage) -> None:
    deaf = stage.unit("deaf", STUBBORN, grace=60.0)
    stage.supervisor.launch([deaf])
    pid = stage.supervisor.pids()["deaf"]
    assert processes.wait_until(lambda: "deaf" in (stage.folder / "deaf.log").read_text())
    previous = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    # Started in the background by a shell, this process would ignore SIGINT.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert stage.supervisor.stop() is False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.signal(signal.SIGINT, heard)
    assert not processes.is_alive(pid)


def test_what_never_started_is_not_said_to_stop(stage: Stage) -> None:
    absent = stage.unit("absent")
    absent.spec = dataclasses.replace(absent.spec, log=stage.folder / "no-such-folder" / "log")
    with pytest.raises(LocalError):
        stage.supervisor.launch([absent])
    assert stage.supervisor.stop()
    assert stage.recorder.events == [("starting", "absent")]


class Unrecorded(ProcessUnit):
    """Ends its process, and then cannot write that down."""

    def stop(self, *, grace: float | None = None) -> None:
        super().stop(grace=grace)
        raise LocalError("the disk is full", ExitCode.DISK_FULL)


def test_what_cannot_be_written_down_about_a_unit_keeps_no_other_from_its_stop(stage: Stage) -> None:
    troubled = Unrecorded(stage.unit("troubled").spec)
    stage.supervisor.launch([stage.unit("older"), troubled])
    pids = stage.supervisor.pids()
    assert stage.supervisor.stop()
    assert [event for event in stage.recorder.events if event[0] != "ready"][-3:] == [
        ("stopping", "troubled"),
        ("the disk is full", "troubled"),
        ("stopping", "older"),
    ]
    assert not any(processes.is_alive(pid) for pid in pids.values())


def test_a_unit_that_ended_is_started_again_whatever_could_not_be_written_down(stage: Stage) -> None:
    stage.supervisor.launch([Unrecorded(stage.unit("troubled").spec)])
    os.kill(stage.supervisor.pids()["troubled"], signal.SIGKILL)
    stage.turn_until(("ready", "troubled"), count=2)
    stage.supervisor.stop()


def test_a_killed_guardian_is_replaced(stage: Stage) -> None:
    stage.supervisor.launch([stage.unit("one")])
    guardian = stage.supervisor.guardian_pid
    os.kill(guardian, signal.SIGKILL)
    assert processes.wait_until(lambda: stage.supervisor.turn(0.05) or stage.supervisor.guardian_pid != guardian)
    assert processes.is_alive(stage.supervisor.guardian_pid)
    stage.supervisor.stop()


def test_descendants_end_with_their_unit(stage: Stage) -> None:
    code = (
        f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)\n{SLEEP}"
    )
    stage.supervisor.launch([stage.unit("parent", code)])
    log = stage.folder / "parent.log"
    assert processes.wait_until(lambda: log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    assert processes.is_alive(grandchild)
    stage.supervisor.stop()
    assert processes.wait_until(lambda: not processes.is_alive(grandchild))
