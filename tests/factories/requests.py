"""Requests for tests of scheduler and memory, and an executor that answers without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dataplane.memory.manager import KVManager
from dataplane.protocol import RequestOutput, SamplingParams
from dataplane.request import Request
from dataplane.scheduling.capacity import Reserve
from dataplane.scheduling.config import SchedulerConfig
from dataplane.scheduling.connector import KVConnector
from dataplane.scheduling.plan import Plan, RunningRequest, StepResult
from dataplane.scheduling.preemption import PrefillSeconds
from dataplane.scheduling.scheduler import Scheduler
from tests.factories.kv_memory import KVMemory


def make_request(request_id: str, tokens: Iterable[int], *, max_tokens: int = 16, **fields: Any) -> Request:
    """A request as the core would make it."""
    prompt = list(tokens)
    params = fields.pop("params", SamplingParams(max_tokens=max_tokens, temperature=0.0))
    return Request(
        request_id=request_id,
        tokens=prompt,
        prompt_len=len(prompt),
        params=params,
        max_tokens=params.max_tokens or max_tokens,
        seed=0,
        queued=fields.pop("queued", 0.0),
        **fields,
    )


def make_scheduler(
    *,
    num_blocks: int = 1000,
    block_size: int = 16,
    caching: bool = True,
    host_blocks: int = 0,
    eos: Sequence[int] = (),
    kv_bytes: int = 0,
    prefill_seconds: PrefillSeconds | None = None,
    reserve: Reserve | None = None,
    connector: KVConnector | None = None,
    **config: Any,
) -> Scheduler:
    """A scheduler over a pool of its own."""
    return Scheduler(
        SchedulerConfig(**config),
        KVManager(num_blocks, block_size, prefix_caching=caching, host_blocks=host_blocks),
        eos_token_ids=eos,
        kv_bytes=kv_bytes,
        prefill_seconds=prefill_seconds,
        reserve=reserve,
        connector=connector,
    )


def step(scheduler: Scheduler, now: float = 0.0) -> Plan:
    """Plan and commit one step whose every sample is token 0."""
    plan = scheduler.plan(now)
    scheduler.commit(plan, StepResult({request_id: [0] for request_id in plan.samples}), now)
    scheduler.check_integrity()
    return plan


class ScriptedExecutor:
    """Answers every sample with `token(request_id, position)`; the position is that of the new token.

    It keeps its own tables as a real executor would, from the plans alone, and checks them: what it is told of a
    running request must continue what it knows.
    """

    def __init__(self, token: Callable[[str, int], int]) -> None:
        self._token = token
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def run(self, plan: Plan) -> StepResult:
        for request_id in plan.dropped:
            self.tables.pop(request_id, None)
            self.computed.pop(request_id, None)
        for new in plan.new:
            assert new.request_id not in self.tables, "a request the executor holds was sent whole again"
            self.tables[new.request_id] = list(new.blocks)
            self.computed[new.request_id] = new.computed
        for running in plan.running:
            self.tables[running.request_id] = extended(self.tables[running.request_id], running)
            assert self.computed[running.request_id] == running.computed
        tokens = {}
        for request_id, count in plan.tokens.items():
            self.computed[request_id] += count
            if request_id in plan.samples:
                tokens[request_id] = [self._token(request_id, self.computed[request_id])]
        for fork in plan.new:
            if fork.parent:
                assert fork.request_id not in plan.tokens, "a fork computes nothing in the step that makes it"
                assert self.computed[fork.request_id] == self.computed[fork.parent] == fork.prompt_len
                tokens[fork.request_id] = [self._token(fork.request_id, fork.computed)]
        return StepResult(tokens)


def extended(table: Sequence[int], running: RunningRequest) -> list[int]:
    """A table the executor holds, as a plan changes it."""
    changed = list(table)
    if running.replaced is not None:
        index, block = running.replaced
        changed[index] = block
    return changed + running.new_blocks


def run_to_end(
    scheduler: Scheduler, executor: ScriptedExecutor, *, each_step: Callable[[Plan], None] | None = None
) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; every output by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    now = 0.0
    while scheduler.has_work():
        now += 1.0
        plan = scheduler.plan(now)
        assert plan.tokens, "the scheduler has work and plans nothing"
        for output in scheduler.commit(plan, executor.run(plan), now + 0.5):
            outputs.setdefault(output.request_id, []).append(output)
        scheduler.check_integrity()
        if each_step is not None:
            each_step(plan)
    return outputs


def generated(outputs: Iterable[RequestOutput]) -> list[int]:
    """All tokens of one request's outputs."""
    return [token for output in outputs for token in output.token_ids]


VOCAB = 50


def fold(before: int, token: int) -> int:
    """One step of a running digest over tokens."""
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


def fold_all(root: int, tokens: Iterable[int]) -> int:
    """The digest of a whole prefix."""
    digest = root
    for token in tokens:
        digest = fold(digest, token)
    return digest


def undisturbed(prompt: Sequence[int], root: int, count: int, seed: int = 0) -> list[int]:
    """What `KVExecutor` generates for a request that runs alone and is never preempted."""
    digest, tokens = fold_all(root, prompt), []
    for _ in range(count):
        tokens.append((digest + seed) % VOCAB)
        digest = fold(digest, tokens[-1])
    return tokens


class KVExecutor(ScriptedExecutor):
    """Keeps a digest of the whole prefix in every KV slot and reads it back through the block table.

    A block that is shared wrongly, overwritten, moved wrongly, or used before it is written gives another token.
    `root` is where a request's digest starts: different for those that must not share. The seed enters the choice of
    tokens, so that forks part.
    """

    def __init__(self, block_size: int, root: Callable[[str], int]) -> None:
        super().__init__(self._choose)
        self._block_size = block_size
        self._root = root
        self.memory = KVMemory(block_size)
        self.connector: KVConnector | None = None
        self._sequences: dict[str, list[int]] = {}
        self._seeds: dict[str, int] = {}

    def run(self, plan: Plan) -> StepResult:
        self.memory.clear(plan.scrub)
        self.memory.apply(plan.transfers)
        for load in plan.loads:
            assert self.connector is not None
            self.connector.start_load(load)
        for new in plan.new:
            self._sequences[new.request_id] = list(new.tokens)
            self._seeds[new.request_id] = new.seed
        starts = self.computed | {new.request_id: new.computed for new in plan.new}
        tables = self.tables | {new.request_id: list(new.blocks) for new in plan.new}
        for running in plan.running:
            tables[running.request_id] = extended(self.tables[running.request_id], running)
        for request_id, count in plan.tokens.items():
            self._write(request_id, tables[request_id], starts[request_id], count)
        for request_id, count in plan.tokens.items():
            self._verify(request_id, tables[request_id], starts[request_id] + count)
        result = super().run(plan)
        for request_id, tokens in result.tokens.items():
            self._sequences[request_id] += tokens
        return result

    def _write(self, request_id: str, table: list[int], start: int, count: int) -> None:
        for position in range(start, start + count):
            before = self.memory.read(table, position - 1) if position else self._root(request_id)
            self.memory.write(table, position, fold(before, self._sequences[request_id][position]))

    def _verify(self, request_id: str, table: list[int], length: int) -> None:
        """Attention reads every position: all of them must hold this request's own prefix."""
        digest = self._root(request_id)
        for position in range(length):
            digest = fold(digest, self._sequences[request_id][position])
            assert self.memory.read(table, position) == digest, f"{request_id} reads foreign KV at position {position}"

    def _choose(self, request_id: str, length: int) -> int:
        return (self.memory.read(self.tables[request_id], length - 1) + self._seeds[request_id]) % VOCAB
