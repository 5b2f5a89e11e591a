"""Remote KV in the real engine: what was loaded is what would have been computed, whatever becomes of a load.

Another engine computed the workload of the parity table; a connector holds its blocks. Every run compares tokens and
log-probabilities with those of each request alone on a cold engine, and checks the accounts after each step.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from dataplane.config import EngineConfig
from dataplane.core_link import CoreEndpoint, FrontEndpoint
from dataplane.core_process import CoreLoop
from dataplane.engine import EngineCore
from dataplane.memory.kv_store import KVStore
from dataplane.protocol import AddRequest, EngineRequest, FinishReason, RequestOutput, Shutdown, StepOutput
from dataplane.scheduling.connector import LocalConnector
from dataplane.scheduling.plan import Plan, RemoteLoad, Transfers
from tests.dataplane.parity.test_table import SAMPLING, TIGHT, Made, build, same, serve, wire, workload
from tests.factories.models import tiny_config, write_safetensors

SIZE, EPOCH = 16, 3
Contents = dict[bytes, Tensor]


class Eager(LocalConnector[Tensor]):
    """Its loads end in the moment in which they begin: the earliest that anything can be written."""

    def start_load(self, load: RemoteLoad) -> None:
        super().start_load(load)
        self.deliver()


class Harmful(LocalConnector[Tensor]):
    """Its loads fail, and leave what is no number in every block."""

    def deliver(self) -> None:
        while self._pending:
            load = self._pending.popleft()
            for block in load.blocks:
                self._write(block, torch.tensor(math.nan).expand(6, 2, SIZE * 16))
            self._loaded.append((load.request_id, 0))
        self._wake()


class Late(LocalConnector[Tensor]):
    """Its loads end some milliseconds later, in a thread of its own."""

    def start_load(self, load: RemoteLoad) -> None:
        super().start_load(load)
        threading.Timer(0.003, self.deliver).start()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("tiny"), tiny_config())


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Made]:
    core = build(folder, prefix_caching=False)
    made: dict[str, Made] = {}
    for request in workload():
        made |= serve(core, [request])
    return made


@pytest.fixture(scope="module")
def contents(folder: Path) -> Contents:
    """The full blocks of the workload, as an engine has computed them."""
    core = build(folder)
    serve(core, workload())
    return exported(core)


def exported(core: EngineCore) -> Contents:
    """Every block that can be found in the engine's pool, by hash."""
    return {
        block.key: core._runner.store.export(block.block_id) for block in core._kv.pool.blocks if block.key is not None
    }


class Bench:
    """An engine with a connector that holds `contents`, and the event that it is woken by."""

    def __init__(
        self, folder: Path, contents: Contents, kind: type[LocalConnector[Tensor]] = LocalConnector, **options: Any
    ) -> None:
        self.woken = threading.Event()
        self.on_wake: Callable[[], None] = self.woken.set

        def connect(store: KVStore) -> LocalConnector[Tensor]:
            self.connector = kind(store.block_size, store.load, self.wake)
            for key, content in contents.items():
                self.connector.store(key, content)
            return self.connector

        config = EngineConfig.resolve(folder, **{"num_blocks": 200, "threads": 1, **options})
        self.core = EngineCore(config, connect=connect)
        self.outputs: list[RequestOutput] = []
        self.steps = 0

    def wake(self) -> None:
        self.on_wake()

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.core.add(request)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        outputs = self.core.step()
        self.core.check_integrity()
        self.outputs += outputs
        return outputs

    def drain(self) -> dict[str, Made]:
        """Step to the end; where nothing can be done, wait to be woken."""
        while self.core.has_work():
            self.woken.clear()
            self.step()
            if self.core.pause_s:
                assert self.woken.wait(30), "nobody wakes the engine"
        made: dict[str, Made] = {}
        for output in self.outputs:
            into = made.setdefault(output.request_id, Made())
            into.tokens += output.token_ids
            into.logprobs += output.logprobs
            into.finish, into.cached = output.finish, output.cached_tokens
            into.prompt_logprobs = output.prompt_logprobs or into.prompt_logprobs
        assert self.core.stats().gauges.blocks_used == 0
        self.outputs = []
        return made

    @property
    def loading(self) -> int:
        return self.core.stats().gauges.waiting_for_remote_kv


@pytest.fixture
def start(folder: Path, contents: Contents) -> Iterator[Callable[..., Bench]]:
    """Makes benches over `contents`, and ends their threads."""
    made: list[Bench] = []

    def make(kind: type[LocalConnector[Tensor]] = LocalConnector, **options: Any) -> Bench:
        made.append(Bench(folder, contents, kind, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.core.close()


def request(index: int) -> EngineRequest:
    """One of the workload: 8 and 12 have prompts of 48 and 49 tokens, two and three blocks of which can be loaded."""
    return next(wanted for wanted in workload() if wanted.request_id == str(index))


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("kind", [Eager, Late])
def test_loaded_is_cold(
    start: Callable[..., Bench], alone: dict[str, Made], kind: type[LocalConnector[Tensor]], flights: int
) -> None:
    bench = start(kind, steps_in_flight=flights)
    bench.add(*workload())
    made = bench.drain()
    same(made, alone)
    for asked in workload():
        scored = asked.params.prompt_logprobs is not None
        there = (len(asked.prompt_token_ids) - 1) // SIZE * SIZE
        assert made[asked.request_id].cached == (0 if scored else there)


def test_a_wrong_block_is_seen(folder: Path, contents: Contents, alone: dict[str, Made]) -> None:
    """Negative control: the loaded tensors, and nothing else, are what is read."""
    bench = Bench(folder, {key: content.roll(1, dims=-1) for key, content in contents.items()}, Eager)
    bench.add(request(8))
    with pytest.raises(AssertionError):
        same(bench.drain(), {"8": alone["8"]})


@pytest.mark.parametrize("flights", [1, 2])
def test_what_a_load_did_not_bring_is_computed(
    start: Callable[..., Bench], alone: dict[str, Made], flights: int
) -> None:
    bench = start(steps_in_flight=flights)
    bench.add(request(12), request(8))
    bench.step()
    assert bench.loading == 2
    for loading in bench.core._scheduler._loads.loading.values():
        bench.connector.forget(loading.block_hashes[1])
    bench.connector.deliver()
    made = bench.drain()
    same(made, {name: alone[name] for name in ("8", "12")})
    assert (made["12"].cached, made["8"].cached) == (16, 16)


def test_what_a_failed_load_left_in_its_blocks_is_never_read(
    start: Callable[..., Bench], alone: dict[str, Made]
) -> None:
    """Chunks that fill half a block read the other half, masked; a NaN would come through the mask."""
    bench = start(Harmful, num_blocks=33, max_num_batched_tokens=8)
    bench.add(request(12), request(8))
    bench.step()
    assert bench.loading == 2
    assert bench.core.abort(["8"])[0].finish is FinishReason.ABORT
    bench.connector.deliver()
    bench.add(request(2))
    made = bench.drain()
    same({name: made[name] for name in ("2", "12")}, {name: alone[name] for name in ("2", "12")})
    assert torch.stack([tensor.isfinite().all() for tensor in bench.core._runner.store.keys]).all()


@pytest.mark.parametrize("flights", [1, 2])
def test_a_load_that_does_not_end_holds_its_own_blocks_and_nobody_else(
    start: Callable[..., Bench], alone: dict[str, Made], flights: int
) -> None:
    bench = start(steps_in_flight=flights)
    bench.add(request(12), wire("short", [5, 6, 7], temperature=0.0))
    while not any(output.finish for output in bench.outputs):
        bench.step()
    assert bench.outputs[-1].request_id == "short"
    for _ in range(3):
        assert bench.step() == []
    # Only a load is under way: the loop may sleep for as long as it takes.
    assert bench.core.pause_s == math.inf
    (aborted,) = bench.core.abort(["12"])
    assert (aborted.finish, aborted.token_ids) == (FinishReason.ABORT, [])
    bench.core.check_integrity()
    assert bench.step() == []
    assert bench.core.stats().gauges.blocks_used == 3
    assert bench.core.has_work()
    assert bench.core.pause_s == math.inf
    assert not bench.core.reset_prefix_cache()
    bench.connector.deliver()
    assert bench.woken.is_set()
    bench.drain()
    assert not bench.core.has_work()
    bench.add(request(12))
    bench.step()
    bench.connector.deliver()
    same(bench.drain(), {"12": alone["12"]})


@pytest.mark.parametrize("flights", [1, 2])
def test_nobody_pauses_while_what_was_given_up_may_serve_another(
    folder: Path, start: Callable[..., Bench], alone: dict[str, Made], flights: int
) -> None:
    """Five blocks: a load has three; "near" has two, needs a third and gives both up, and "small" needs only one."""
    near = wire("near", list(range(3, 34)), temperature=0.0)
    small = msgspec.structs.replace(wire("small", [5, 6, 7], temperature=0.0, max_tokens=4), priority=-1)
    expected = serve(build(folder), [near, small])
    bench = start(num_blocks=6, max_model_len=80, watermark=0.0, steps_in_flight=flights)
    bench.add(request(12), near)
    bench.step()
    assert bench.loading == 1
    bench.add(small)
    while not any(output.finish for output in bench.outputs):
        assert bench.core.pause_s == 0.0
        bench.step()
    assert bench.outputs[-1].request_id == "small"
    while bench.core.pause_s != math.inf:
        bench.step()
    bench.connector.deliver()
    same(bench.drain(), {**expected, "12": alone["12"]})


def test_the_event_of_a_load_that_ends_after_the_plan_is_not_lost(
    start: Callable[..., Bench], alone: dict[str, Made]
) -> None:
    bench = start(Late)
    for _ in range(20):
        bench.add(request(12))
        same(bench.drain(), {"12": alone["12"]})
        assert bench.core.reset_prefix_cache()


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("kind", [Eager, Late])
def test_what_a_load_writes_over_has_been_moved_out(
    folder: Path,
    start: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[LocalConnector[Tensor]],
    flights: int,
) -> None:
    """A tight pool with host memory behind it: loads get blocks that the same plan evicts or swaps out."""
    generator = torch.Generator().manual_seed(4)  # of 3, one draw lies on the edge between two tokens
    crowd = [
        wire(str(index), torch.randint(3, 128, (60 + index,), generator=generator).tolist(), **SAMPLING[index % 6])
        for index in range(24)
    ]
    donor = build(folder, num_blocks=400)
    expected = serve(donor, crowd)
    tight: dict[str, Any] = {**TIGHT, "num_blocks": 17, "preemption": "swap", "host_blocks": 256}
    bench = start(kind, **tight, steps_in_flight=flights)
    # What the connector lacks is computed, evicted, and must come back from host memory.
    for key, content in list(exported(donor).items())[::2]:
        bench.connector.store(key, content)
    submit, move, over = bench.core._runner.submit, bench.core._runner.store.move, 0

    def watch(plan: Plan) -> Any:
        nonlocal over
        out = {block for block, _ in plan.transfers.swap_out}
        over += sum(not out.isdisjoint(load.blocks) for load in plan.loads)
        return submit(plan)

    def slow(transfers: Transfers) -> None:
        time.sleep(0.002)
        move(transfers)

    monkeypatch.setattr(bench.core._runner, "submit", watch)
    monkeypatch.setattr(bench.core._runner.store, "move", slow)
    for requests in (crowd, crowd[::-1]):
        bench.add(*requests)
        same(bench.drain(), expected)
    counters = bench.core.stats().counters.memory
    assert over > 3
    assert counters.swapped_in > 0
    assert counters.host_hits > 0


def test_s5_a_preempted_request_restarts_with_what_was_loaded(folder: Path) -> None:
    """Two requests, five usable blocks, the first block of each prompt elsewhere: all is given back in the end."""
    prompts = {"old": list(range(3, 29)), "new": list(range(40, 66))}
    donor = build(folder, prefix_caching=True)
    asked = [wire(name, prompt, temperature=0.0, max_tokens=24) for name, prompt in prompts.items()]
    expected = serve(donor, asked)
    bench = Bench(folder, {}, num_blocks=6, watermark=0.0, max_model_len=64)
    bench.add(*asked)
    keys = [request.block_hashes[0] for request in bench.core._scheduler.waiting if bench.core._kv.match(request)]
    for key in keys:
        bench.connector.store(key, exported(donor)[key])
    bench.step()
    assert bench.loading == 2
    bench.connector.deliver()
    made = bench.drain()
    same(made, expected)
    assert {name: one.cached for name, one in made.items()} == {"old": 16, "new": 16}
    assert bench.core.stats().counters.scheduling.preemptions["recompute"] == 1
    assert bench.core.stats().gauges.blocks_free == 5


@asynccontextmanager
async def looping(bench: Bench) -> AsyncIterator[FrontEndpoint]:
    """The bench's engine in the core's loop, driven over its link."""
    front = FrontEndpoint()
    try:
        with CoreEndpoint(front.address, EPOCH) as link:
            bench.on_wake = link.wake
            loop = asyncio.create_task(asyncio.to_thread(CoreLoop(bench.core, link, interrupted=lambda: False).run))
            await front.receive()
            try:
                yield front
            finally:
                front.send(EPOCH, Shutdown(boot_epoch=EPOCH, drain=False))
                await asyncio.wait_for(loop, 30)
    finally:
        front.close()


async def test_the_loop_sleeps_while_a_load_is_all_that_is_under_way(
    start: Callable[..., Bench], alone: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start()
    step, steps, stalled = bench.core.step, 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def counted() -> list[RequestOutput]:
        nonlocal steps
        steps += 1
        outputs = step()
        if bench.core.pause_s == math.inf:
            loop.call_soon_threadsafe(stalled.set)
        return outputs

    monkeypatch.setattr(bench.core, "step", counted)
    async with looping(bench) as front:
        front.send(EPOCH, AddRequest(request=request(12), boot_epoch=EPOCH))
        await asyncio.wait_for(stalled.wait(), 30)
        await asyncio.sleep(0.3)
        assert steps == 2, "one to begin the load, one to see that there is nothing else"
        bench.connector.deliver()
        tokens: list[int] = []
        while len(tokens) < len(alone["12"].tokens):
            _, message = await asyncio.wait_for(front.receive(), 30)
            assert isinstance(message, StepOutput)
            tokens += [token for output in message.outputs for token in output.token_ids]
        assert tokens == alone["12"].tokens
