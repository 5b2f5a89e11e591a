"""The front's hold on its core: nothing hangs when the core dies, and it comes back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from dataplane.core_client import CoreClient, CoreSpec, CoreUnavailableError, RestartPolicy
from dataplane.protocol import CoreStats, EngineRequest, FinishReason, ReplicaState, RequestOutput, SamplingParams
from tests.dataplane.replica.harness import QUICK, scripted, until

STALL_S = 3.0


class Log:
    """What a core client tells."""

    def __init__(self) -> None:
        self.states: list[tuple[ReplicaState, int]] = []
        self.stats: list[tuple[int, CoreStats]] = []
        self.client: CoreClient

    def changed(self) -> None:
        self.states.append((self.client.state, self.client.epoch))

    def took(self, epoch: int, stats: CoreStats) -> None:
        self.stats.append((epoch, stats))


@asynccontextmanager
async def running(
    spec: CoreSpec, *, restart: RestartPolicy = QUICK, ready: bool = True
) -> AsyncIterator[tuple[CoreClient, Log]]:
    log = Log()
    log.client = client = CoreClient(spec, on_change=log.changed, on_stats=log.took, restart=restart)
    await client.start()
    try:
        if ready:
            await until(lambda: client.state is ReplicaState.READY, "the core is ready")
        yield client, log
    finally:
        await client.stop()


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams(max_tokens=8), arrived_at=0.0)


def submit(client: CoreClient, name: str) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    client.submit(request(name), outputs.append)
    return outputs


def ended(*logs: list[RequestOutput]) -> Callable[[], bool]:
    return lambda: all(log and log[-1].finish is not None for log in logs)


async def test_outputs_reach_their_own_request_in_order() -> None:
    async with running(scripted(emit=4)) as (client, log):
        first, second = submit(client, "a"), submit(client, "b")
        await until(ended(first, second), "both finish")
        assert {output.request_id for output in first} == {"a"}
        assert [output.finish for output in second] == [None, None, None, FinishReason.LENGTH]
        assert client.in_flight == 0
        assert [epoch for epoch, _ in log.stats] == [1] * 8


async def test_kill_9_ends_every_request_at_once_and_the_core_comes_back() -> None:
    async with running(scripted(emit=2, finish=False)) as (client, log):
        hanging = [submit(client, name) for name in ("a", "b", "c")]
        await until(lambda: all(len(outputs) == 2 for outputs in hanging), "tokens come")
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGKILL)
        await until(ended(*hanging), "every request ends")
        for outputs in hanging:
            assert outputs[-1].finish is FinishReason.ERROR
            assert outputs[-1].error == "the engine core was killed by SIGKILL"
        assert client.in_flight == 0
        await until(lambda: client.state is ReplicaState.READY, "the core is back")
        assert (client.epoch, client.restarts) == (2, 1)
        again = submit(client, "d")
        await until(lambda: len(again) == 2, "the new core serves")
        assert log.states == [
            (ReplicaState.READY, 1),
            (ReplicaState.FAILED, 1),
            (ReplicaState.STARTING, 1),
            (ReplicaState.READY, 2),
        ]


def stop_core(client: CoreClient) -> int:
    """SIGSTOP: the process is there and says nothing, as one that is stuck in a driver."""
    assert client.process_id is not None
    os.kill(client.process_id, signal.SIGSTOP)
    return client.process_id


async def test_a_core_that_hangs_is_first_given_nothing_new_then_killed_and_replaced() -> None:
    async with running(scripted(mode="hang", emit=2, finish=False, stall_s=STALL_S)) as (client, log):
        hanging = submit(client, "a")
        await until(lambda: len(hanging) == 2, "tokens come")
        first = client.process_id
        await until(lambda: client.state is ReplicaState.DRAINING, "its silence is noticed")
        assert client.reason == f"the engine core has said nothing for {STALL_S / 2:g} s"
        assert hanging[-1].finish is None, "what runs may still go on"
        with pytest.raises(CoreUnavailableError) as caught:
            submit(client, "b")
        assert caught.value.reason == client.reason
        await until(ended(hanging), "the request ends")
        assert hanging[-1].finish is FinishReason.ERROR
        assert hanging[-1].error == f"the engine core hung: no answer for {STALL_S:g} s"
        await until(lambda: client.state is ReplicaState.READY, "a new core is ready")
        assert client.process_id != first
        assert first is not None
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert (client.epoch, client.restarts, client.in_flight) == (2, 1, 0)
        assert log.states == [
            (ReplicaState.READY, 1),
            (ReplicaState.DRAINING, 1),
            (ReplicaState.FAILED, 1),
            (ReplicaState.STARTING, 1),
            (ReplicaState.READY, 2),
        ]


async def test_an_idle_core_that_hangs_is_found_before_anybody_asks() -> None:
    async with running(scripted(stall_s=STALL_S)) as (client, log):
        stop_core(client)
        await until(lambda: client.epoch == 2 and client.state is ReplicaState.READY, "a new core is ready")
        assert [state for state, epoch in log.states if epoch == 1] == [
            ReplicaState.READY,
            ReplicaState.DRAINING,
            ReplicaState.FAILED,
            ReplicaState.STARTING,
        ]


async def test_a_core_that_speaks_again_goes_on_with_what_it_had() -> None:
    async with running(scripted(emit=1, finish=False, stall_s=4 * STALL_S)) as (client, log):
        outputs = submit(client, "a")
        await until(lambda: len(outputs) == 1, "it runs")
        pid = stop_core(client)
        await until(lambda: client.state is ReplicaState.DRAINING, "its silence is noticed")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.state is ReplicaState.READY, "its word is heard")
        client.abort(["a"])
        await until(ended(outputs), "it answers")
        assert outputs[-1].finish is FinishReason.ABORT
        assert client.restarts == 0
        assert [state for state, _ in log.states] == [ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.READY]


async def test_a_front_that_was_held_up_does_not_blame_its_core() -> None:
    async with running(scripted(stall_s=STALL_S)) as (_, log):
        time.sleep(1.5 * STALL_S)
        await asyncio.sleep(STALL_S / 2)
        assert log.states == [(ReplicaState.READY, 1)]


async def test_how_long_a_core_loads_is_not_watched() -> None:
    async with running(scripted(loading_s=1.5, stall_s=1.0)) as (client, log):
        assert log.states == [(ReplicaState.READY, 1)]
        assert client.restarts == 0


async def test_a_hung_core_is_stopped_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core_client.TERMINATE_AFTER_S", 0.2)
    monkeypatch.setattr("dataplane.core_client.KILL_AFTER_S", 0.2)
    async with running(scripted()) as (client, _):
        pid = stop_core(client)
        await client.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_request_while_the_core_is_gone_is_refused_with_a_time_to_wait() -> None:
    slow = RestartPolicy(first_s=30.0, longest_s=30.0)
    async with running(scripted(), restart=slow) as (client, _):
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGKILL)
        await until(lambda: client.state is ReplicaState.FAILED, "the death is noticed")
        with pytest.raises(CoreUnavailableError) as caught:
            submit(client, "a")
        assert caught.value.retry_after_s >= 1.0
        assert "SIGKILL" in caught.value.reason
        assert client.process_id is None


async def test_a_fault_the_core_reports_is_the_reason_requests_end() -> None:
    async with running(scripted(mode="fault"), restart=RestartPolicy(first_s=30.0)) as (client, _):
        outputs = submit(client, "a")
        await until(ended(outputs), "the request ends")
        assert outputs[-1].error == "the engine core failed: the script says so"
        assert client.reason == outputs[-1].error


@pytest.mark.parametrize("mode", ["fault", "config"])
async def test_a_core_that_reports_a_fault_and_does_not_exit_is_killed_and_replaced(mode: str) -> None:
    """While it serves, its step may be stuck in the thread that Python waits for; while it loads, likewise."""
    async with running(scripted(mode=mode, exits=False, stall_s=1.0), ready=mode == "fault") as (client, log):
        if mode == "fault":
            outputs = submit(client, "a")
            await until(ended(outputs), "the request ends at once")
        await until(lambda: client.process_id is not None, "the core is there")
        first = client.process_id
        assert first is not None
        await until(lambda: client.restarts == 1, "it is replaced")
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert (ReplicaState.FAILED, 1) in log.states
        sentence = "the script says so" if mode == "fault" else "there is no model at /nowhere"
        assert client.reason == f"restarting: the engine core failed: {sentence}"


async def test_a_doubtful_core_that_reports_a_fault_is_not_announced_as_ready() -> None:
    async with running(scripted(mode="fault", waits=True, stall_s=2 * STALL_S)) as (client, log):
        outputs = submit(client, "a")
        await until(lambda: client.state is ReplicaState.DRAINING, "its silence is noticed")
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGCONT)
        await until(ended(outputs), "the request ends")
        assert outputs[-1].error == "the engine core failed: the script says so"
        assert [state for state, epoch in log.states if epoch == 1][:3] == [
            ReplicaState.READY,
            ReplicaState.DRAINING,
            ReplicaState.FAILED,
        ]


async def test_a_core_whose_frame_cannot_be_read_is_lost_with_what_was_in_it() -> None:
    async with running(scripted(mode="garbled")) as (client, _):
        first = client.process_id
        assert first is not None
        outputs = submit(client, "a")
        await until(ended(outputs), "the request ends")
        assert outputs[-1].finish is FinishReason.ERROR
        assert outputs[-1].error is not None
        assert outputs[-1].error.startswith("the engine core sent an unreadable frame: ")
        await until(lambda: client.epoch == 2 and client.state is ReplicaState.READY, "a new core is ready")
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert (client.restarts, client.in_flight) == (1, 0)


async def test_a_configuration_that_cannot_work_is_not_tried_again() -> None:
    async with running(scripted(mode="config"), ready=False) as (client, _):
        async with asyncio.timeout(60):
            await client.hopeless.wait()
        assert client.state is ReplicaState.FAILED
        assert client.reason == "there is no model at /nowhere"
        assert (client.epoch, client.restarts) == (1, 0)


async def test_a_core_that_crashes_while_loading_is_tried_again_with_higher_epochs() -> None:
    async with running(scripted(mode="crash"), ready=False) as (client, log):
        await until(lambda: client.restarts >= 2, "it is tried again")
        assert not client.hopeless.is_set()
        failed = [epoch for state, epoch in log.states if state is ReplicaState.FAILED]
        assert failed == sorted(set(failed))
        assert "exited with code 7 while loading its model" in client.reason


async def test_a_program_that_cannot_be_started_is_a_failure_with_a_reason() -> None:
    async with running(CoreSpec(model="m", command=("/nowhere/python",)), ready=False) as (client, _):
        await until(lambda: client.restarts >= 1, "it is tried again")
        assert "cannot start the process" in client.reason


async def test_frames_of_another_epoch_are_dropped() -> None:
    async with running(scripted(mode="stale", emit=3)) as (client, log):
        outputs = submit(client, "a")
        await until(ended(outputs), "the frame of the right epoch comes")
        assert [output.finish for output in outputs] == [FinishReason.LENGTH]
        assert [epoch for epoch, _ in log.stats] == [1]


async def test_abort_ends_a_request_with_the_cores_last_word() -> None:
    async with running(scripted(emit=1, finish=False)) as (client, _):
        outputs = submit(client, "a")
        await until(lambda: len(outputs) == 1, "it runs")
        client.abort(["a", "unknown"])
        client.abort(["a"])
        await until(ended(outputs), "it ends")
        assert outputs[-1].finish is FinishReason.ABORT
        assert outputs[-1].timing is not None
        client.abort(["a"])
        assert client.in_flight == 0


async def test_stop_ends_what_runs_and_the_process() -> None:
    log = Log()
    log.client = client = CoreClient(scripted(emit=1, finish=False), on_change=log.changed, on_stats=log.took)
    await client.start()
    await until(lambda: client.state is ReplicaState.READY, "the core is ready")
    outputs = submit(client, "a")
    await until(lambda: len(outputs) == 1, "it runs")
    pid = client.process_id
    assert pid is not None
    await client.stop()
    assert outputs[-1].finish is FinishReason.ABORT
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_core_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core_client.TERMINATE_AFTER_S", 0.2)
    monkeypatch.setattr("dataplane.core_client.KILL_AFTER_S", 0.2)
    async with running(scripted(mode="deaf")) as (client, _):
        pid = client.process_id
        assert pid is not None
        await client.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class CountedPauses(RestartPolicy, frozen=True, kw_only=True):
    """Keeps how many failures in a row each pause is for."""

    counted: list[int]

    def pause(self, failures: int, rng: random.Random) -> float:
        self.counted.append(failures)
        return 0.0


async def test_the_time_in_which_a_core_hung_does_not_count_as_stable() -> None:
    now = 0.0
    log, policy = Log(), CountedPauses(stable_s=60.0, counted=[])
    log.client = client = CoreClient(
        scripted(stall_s=STALL_S), on_change=log.changed, on_stats=log.took, restart=policy, clock=lambda: now
    )
    await client.start()
    try:
        for epoch in (1, 2, 3):
            await until(lambda epoch=epoch: client.epoch == epoch and client.ready, "the core is ready")
            stop_core(client)
            await until(lambda: client.state is ReplicaState.DRAINING, "its silence is noticed")
            now += 1000.0
        await until(lambda: client.restarts == 3, "the third is lost too")
    finally:
        await client.stop()
    assert policy.counted == [1, 2, 3]


def test_pauses_grow_are_bounded_and_jittered() -> None:
    policy = RestartPolicy(first_s=1.0, longest_s=10.0)
    rng = random.Random(1)
    for failures in range(1, 200):
        full = min(10.0, 2.0 ** (failures - 1))
        assert 0.5 * full <= policy.pause(failures, rng) <= full
    assert len({policy.pause(5, rng) for _ in range(20)}) > 10
