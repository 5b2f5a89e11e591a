"""Steps in a thread: submitted at once, run in order, failing loudly, ending cleanly."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from dataplane.errors import IntegrityError
from dataplane.runtime.model_runner import DoneHandle
from dataplane.runtime.worker import StepThread
from dataplane.scheduling.plan import Plan, StepResult

WAIT_S = 30.0


class Steps:
    """An executor that does `act` with each step's number, and notes who ran it."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self.ran: list[int] = []
        self.threads: set[int] = set()

    def submit(self, plan: Plan) -> DoneHandle:
        self.threads.add(threading.get_ident())
        self._act(plan.step)
        self.ran.append(plan.step)
        return DoneHandle(StepResult({"a": [plan.step]}))


def plan(step: int) -> Plan:
    return Plan(step, {"a": 1}, frozenset("a"))


def test_submit_returns_while_the_step_still_runs_and_the_next_waits_its_turn() -> None:
    go = threading.Event()

    def wait(_: int) -> None:
        assert go.wait(WAIT_S)

    steps = Steps(wait)
    with closing(StepThread(steps)) as thread:
        handles = [thread.submit(plan(step)) for step in range(5)]
        assert steps.ran == []
        assert not any(handle.future.done() for handle in handles)
        go.set()
        assert [handle.result().tokens["a"] for handle in reversed(handles)] == [[4], [3], [2], [1], [0]]
    assert steps.ran == list(range(5))
    assert len(steps.threads) == 1
    assert threading.get_ident() not in steps.threads


def test_what_a_step_raises_comes_out_of_its_handle_and_no_later_step_runs() -> None:
    def fail(step: int) -> None:
        if step == 1:
            raise ZeroDivisionError("the step broke")

    steps = Steps(fail)
    with closing(StepThread(steps)) as thread:
        good, bad, later = (thread.submit(plan(step)) for step in range(3))
        assert good.result().tokens == {"a": [0]}
        with pytest.raises(ZeroDivisionError, match="the step broke"):
            bad.result()
        with pytest.raises(IntegrityError, match="an earlier step failed"):
            later.result()
        with pytest.raises(ZeroDivisionError):
            bad.result()
    assert steps.ran == [0]


def test_closing_finishes_what_was_submitted_and_takes_no_more() -> None:
    steps = Steps(lambda _: None)
    thread = StepThread(steps)
    handles = [thread.submit(plan(step)) for step in range(20)]
    thread.close()
    assert steps.ran == list(range(20))
    assert all(handle.future.done() for handle in handles)
    with pytest.raises(RuntimeError, match="shutdown"):
        thread.submit(plan(20))
    thread.close()
    assert not [alive for alive in threading.enumerate() if alive.ident in steps.threads]


def test_a_forgotten_one_leaves_no_thread_behind() -> None:
    steps = Steps(lambda _: None)
    thread = StepThread(steps)
    thread.submit(plan(1)).result()
    (worker,) = (alive for alive in threading.enumerate() if alive.ident in steps.threads)
    del thread
    gc.collect()
    worker.join(WAIT_S)
    assert not worker.is_alive()
