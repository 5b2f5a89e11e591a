"""The core's loop: one frame a step, statistics when it falls idle, an orderly end, and never an orphan."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dataplane.core_link import CoreEndpoint, FrontEndpoint
from dataplane.core_process import EXIT_FAULT, EXIT_STOPPED, STATS_INTERVAL_S, CoreLoop, _build, _serve
from dataplane.protocol import (
    AbortRequests,
    AddRequest,
    CoreFault,
    CoreMessage,
    CoreReady,
    CoreStats,
    Counters,
    EngineRequest,
    FinishReason,
    FrontMessage,
    Gauges,
    RequestOutput,
    SamplingParams,
    Shutdown,
    StepOutput,
)
from dataplane.request import RequestError
from tests.factories.models import tiny_config, write_safetensors

EPOCH = 3
END = CoreFault(boot_epoch=EPOCH, error="end of the test")


class CountingEngine:
    """Gives every request one token a step until it has `max_tokens`; counts the steps. No model."""

    ready = CoreReady(boot_epoch=EPOCH, model="m", max_model_len=8, block_size=1, total_blocks=1)
    pause_s = 0.0

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0
        self.checks = 0
        self.closed = threading.Event()
        self.may_close = threading.Event()

    def add(self, request: EngineRequest) -> None:
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        self.left[request.request_id] = request.params.max_tokens or 1

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        gone = [name for name in request_ids if self.left.pop(name, None) is not None]
        return [RequestOutput(request_id=name, finish=FinishReason.ABORT) for name in gone]

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        self.left = {name: left - 1 for name, left in self.left.items()}
        outputs = [
            RequestOutput(request_id=name, token_ids=[7], finish=None if left else FinishReason.LENGTH)
            for name, left in self.left.items()
        ]
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs

    def stats(self) -> CoreStats:
        counters = Counters()
        counters.scheduling.steps = self.steps
        return CoreStats(counters=counters, gauges=Gauges(running=len(self.left)))

    def check_integrity(self) -> None:
        self.checks += 1

    def close(self) -> None:
        """A step under way ends when it may."""
        assert self.may_close.wait(60)
        self.closed.set()


def add(name: str, *, tokens: int = 1, prompt: list[int] | None = None) -> AddRequest:
    prompt = [1] if prompt is None else prompt
    params = SamplingParams(max_tokens=tokens)
    request = EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrived_at=0.0)
    return AddRequest(request=request, boot_epoch=EPOCH)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[FrontEndpoint, CoreEndpoint]]:
    front = FrontEndpoint()
    with CoreEndpoint(front.address, EPOCH) as core:
        core.send(CoreReady(boot_epoch=EPOCH, model="hello", max_model_len=1, block_size=1, total_blocks=1))
        await front.receive()
        yield front, core
    front.close()


async def play(messages: list[FrontMessage], *, tick_s: float = 0.0) -> tuple[CountingEngine, list[CoreMessage]]:
    """Queue messages, run the loop to its end, and read all it sent. A clock tick passes per reading of the clock."""
    engine: Any = CountingEngine()
    times = iter(float(number) * tick_s for number in range(10_000))
    async with linked() as (front, core):
        for message in messages:
            front.send(EPOCH, message)
        loop = CoreLoop(engine, core, interrupted=lambda: False, clock=lambda: next(times), check_when_idle=True)
        await asyncio.to_thread(core.wait)
        await asyncio.to_thread(loop.run)
        core.send(END)
        sent: list[CoreMessage] = []
        while (message := (await front.receive())[1]) != END:
            sent.append(message)
    return engine, sent


def frames(sent: list[CoreMessage]) -> list[StepOutput]:
    return [message for message in sent if isinstance(message, StepOutput) and message.outputs]


async def test_ready_comes_first_and_each_step_is_one_frame() -> None:
    engine, sent = await play([add("a", tokens=3), add("b", tokens=2), Shutdown(boot_epoch=EPOCH)])
    assert sent[0] == CountingEngine.ready
    assert engine.steps == 3
    assert [[output.request_id for output in frame.outputs] for frame in frames(sent)] == [
        ["a", "b"],
        ["a", "b"],
        ["a"],
    ]
    assert [frame.step for frame in frames(sent)] == [1, 2, 3]


async def test_a_request_that_cannot_run_ends_with_its_reason_and_the_rest_goes_on() -> None:
    _, sent = await play([add("bad", prompt=[]), add("good"), Shutdown(boot_epoch=EPOCH)])
    outputs = [output for frame in frames(sent) for output in frame.outputs]
    assert [(output.request_id, output.finish, output.error) for output in outputs] == [
        ("bad", FinishReason.ERROR, "the prompt is empty"),
        ("good", FinishReason.LENGTH, None),
    ]
    assert [(output.error_code, output.error_param) for output in outputs] == [
        ("invalid_value", "prompt"),
        (None, None),
    ]


async def test_a_draining_core_finishes_and_refuses_what_comes_after() -> None:
    _, sent = await play([add("a", tokens=2), Shutdown(drain=True, boot_epoch=EPOCH), add("late")])
    ends = {output.request_id: output.finish for frame in frames(sent) for output in frame.outputs if output.finish}
    assert ends == {"late": FinishReason.ERROR, "a": FinishReason.LENGTH}
    (late,) = [output for frame in frames(sent) for output in frame.outputs if output.request_id == "late"]
    assert late.error_code == "engine_unavailable"


async def test_a_core_told_to_stop_now_does_not_step_again() -> None:
    engine: Any = CountingEngine()
    async with linked() as (front, core):
        for message in (add("a", tokens=1000), Shutdown(drain=False, boot_epoch=EPOCH)):
            front.send(EPOCH, message)
        await asyncio.to_thread(core.wait)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(CoreLoop(engine, core, interrupted=lambda: False).run)
    assert engine.steps <= 1


async def test_aborted_requests_get_their_last_word_and_idle_is_told_with_statistics() -> None:
    abort = AbortRequests(request_ids=["a", "unknown"], boot_epoch=EPOCH)
    engine, sent = await play([add("a", tokens=1000), abort, Shutdown(boot_epoch=EPOCH)])
    ends = [output for frame in frames(sent) for output in frame.outputs if output.finish]
    assert [(output.request_id, output.finish) for output in ends] == [("a", FinishReason.ABORT)]
    last = [message for message in sent if isinstance(message, StepOutput)][-1]
    assert last.stats is not None
    assert last.stats.gauges.running == 0
    assert engine.steps == last.stats.counters.scheduling.steps


@pytest.mark.parametrize(("tick_s", "every"), [(0.0, False), (STATS_INTERVAL_S, True)])
async def test_statistics_ride_along_at_intervals_while_busy(tick_s: float, every: bool) -> None:
    _, sent = await play([add("a", tokens=20), Shutdown(boot_epoch=EPOCH)], tick_s=tick_s)
    with_stats = [frame for frame in frames(sent)[:-1] if frame.stats is not None]
    assert (len(with_stats) == 19) is every
    assert len(with_stats) in (0, 1, 19)


@pytest.mark.parametrize("tokens", [0, 1000], ids=["without work", "with work that waits"])
async def test_a_core_that_is_well_says_so_though_nothing_happens(tokens: int) -> None:
    engine: Any = CountingEngine()
    engine.pause_s = 3600.0
    async with linked() as (front, core):
        if tokens:
            engine.add(add("a", tokens=tokens).request)
        loop = CoreLoop(engine, core, interrupted=lambda: False, beat_s=0.05)
        running = asyncio.create_task(asyncio.to_thread(loop.run))
        heard = 0
        async with asyncio.timeout(60):
            while heard < 4:
                message = (await front.receive())[1]
                heard += isinstance(message, StepOutput) and message.stats is not None
        front.send(EPOCH, Shutdown(drain=False, boot_epoch=EPOCH))
        await running
    assert engine.steps <= 10 * heard, "it slept in between"


async def test_accounts_are_verified_whenever_it_falls_idle() -> None:
    engine, _ = await play([add("a", tokens=2), Shutdown(boot_epoch=EPOCH)])
    assert engine.checks == 1


async def test_a_loop_that_ends_closes_its_core() -> None:
    engine: Any = CountingEngine()
    engine.may_close.set()
    async with linked() as (front, core):
        front.send(EPOCH, Shutdown(boot_epoch=EPOCH))
        loop = CoreLoop(engine, core, interrupted=lambda: False)
        assert await asyncio.to_thread(_serve, engine, core, loop) == EXIT_STOPPED
    assert engine.closed.is_set()


async def test_a_fault_is_told_before_the_steps_under_way_are_waited_for() -> None:
    engine: Any = CountingEngine()
    async with linked() as (front, core):
        front.send(EPOCH, add("a"))
        engine.step = lambda: 1 // 0
        loop = CoreLoop(engine, core, interrupted=lambda: False)
        serving = asyncio.create_task(asyncio.to_thread(_serve, engine, core, loop))
        async with asyncio.timeout(60):
            while not isinstance(message := (await front.receive())[1], CoreFault):
                pass
        assert message.error.startswith("ZeroDivisionError")
        assert not engine.closed.is_set()
        engine.may_close.set()
        assert await serving == EXIT_FAULT
    assert engine.closed.is_set()


FRONT = """
import asyncio
from dataplane.core_client import CoreClient, CoreSpec

async def main():
    client = CoreClient(CoreSpec(model="smollm2"), on_change=lambda: None, on_stats=lambda epoch, stats: None)
    await client.start()
    while client.process_id is None:
        await asyncio.sleep(0.01)
    print(client.process_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_kill_9_of_the_front_takes_the_core_with_it_even_while_it_loads() -> None:
    front = subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE)
    assert front.stdout is not None
    with front, front.stdout:
        core = int(front.stdout.readline())
        os.kill(core, 0)
        front.kill()
        front.wait()
    async with asyncio.timeout(60):
        while _alive(core):
            await asyncio.sleep(0.05)


def _alive(pid: int) -> bool:
    """A zombie that awaits its reaper has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_core_whose_front_is_already_gone_does_not_start() -> None:
    arguments = ["--address", "ipc:///nowhere", "--epoch", "1", "--parent", "1", "--model", "smollm2", "--beat", "1"]
    done = subprocess.run([sys.executable, "-m", "dataplane.core_process", *arguments], timeout=120, check=False)
    assert done.returncode == 0


def test_what_was_loaded_is_out_of_the_garbage_collectors_sight(tmp_path: Path) -> None:
    """A full collection walks through every object of torch: a fifth of a second, in the middle of a step."""
    write_safetensors(tmp_path, tiny_config())
    before = gc.get_freeze_count()
    core = _build(argparse.Namespace(model=str(tmp_path), epoch=EPOCH, options="{}"))
    try:
        assert gc.get_freeze_count() > before + 10_000
    finally:
        gc.unfreeze()
        core.close()
