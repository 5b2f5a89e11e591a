"""The engine core: schedule, execute, update; one call takes one step's result.

Layer: service. Synchronous and without I/O: the process that serves and the offline `LLM` both call it directly. It
joins scheduler, executor and accounting, and holds no policy of its own. With two steps in flight the executor runs in
a thread of its own, and the next step is planned and submitted before the result of this one is waited for.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from dataplane.config import EngineConfig
from dataplane.decoding.grammar import GrammarCompiler
from dataplane.decoding.sampler import check_beginning
from dataplane.decoding.stop import stop_ids
from dataplane.errors import IntegrityError
from dataplane.hardware.device import available_memory, resident_memory, total_memory
from dataplane.memory.kv_store import KVStore
from dataplane.memory.manager import KVManager
from dataplane.protocol import (
    CoreReady,
    CoreStats,
    Counters,
    EngineRequest,
    Gauges,
    Histogram,
    KVEventBatch,
    RankMemory,
    RequestOutput,
    RuntimeCounters,
)
from dataplane.request import Request, RequestError, validate_params, validate_samples
from dataplane.runtime.model_runner import ModelRunner
from dataplane.runtime.worker import StepThread
from dataplane.scheduling.capacity import Room
from dataplane.scheduling.connector import KVConnector
from dataplane.scheduling.plan import Executor, Handle, Plan, StepResult
from dataplane.scheduling.scheduler import Scheduler
from dataplane.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class _Step:
    """A submitted step; `scheduled` seconds went into its plan."""

    plan: Plan
    handle: Handle
    scheduled: float


class EngineCore:
    """One model, one scheduler, one KV pool. Building it loads the model; ConfigError says why it cannot.

    `connect` makes the connector that loads remote KV into the tensors of the pool. When a load has ended, the
    connector must wake the loop that drives this core, which may be pausing for as long as `pause_s` said.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[KVStore], KVConnector] | None = None,
    ) -> None:
        started = clock()
        self.config = config
        self._clock = clock
        self._grammars = GrammarCompiler(partial(load_tokenizer, config.model.path), config.model.shape.vocab)
        self._runner = ModelRunner(config, clock, self._grammars, connect)
        self._kv = KVManager(
            config.cache.num_blocks,
            config.cache.block_size,
            prefix_caching=config.cache.prefix_caching,
            kv_format=config.dtype,
            events=config.cache.kv_events,
            host_blocks=config.cache.host_blocks,
        )
        shape = config.model.shape
        self._scheduler = Scheduler(
            config.scheduler,
            self._kv,
            eos_token_ids=shape.eos_token_ids,
            kv_bytes=shape.kv_bytes_per_token,
            connector=self._runner.connector,
        )
        self._executor: Executor = self._runner
        if config.scheduler.steps_in_flight > 1:
            self._executor = StepThread(self._runner)
        self._in_flight: deque[_Step] = deque()
        self._idle = False
        self._room = Room(config.scheduler, self._kv.pool.usable, config.cache.block_size)
        self._runtime = RuntimeCounters(step_time=Histogram())
        self._seeds = random.Random(config.seed or None)  # noqa: S311 - sampling is no secret
        self._failed = False
        self._step_ended = clock()
        self.ready = CoreReady(
            boot_epoch=config.boot_epoch,
            model=config.model.name,
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            total_blocks=self._kv.pool.usable,
            eos_token_ids=list(shape.eos_token_ids),
            load_seconds=self._step_ended - started,
            device=config.device,
            attention_backend=self._runner.forward.facts.attention,
            forward=self._runner.forward.facts.kind,
            kernel_tier=self._runner.forward.facts.tier,
            weights=self._runner.forward.facts.weights,
            weight_bytes=self._runner.forward.facts.weight_bytes,
            kv_bytes=self._runner.store.nbytes,
            max_num_seqs=config.scheduler.max_num_seqs,
            reserves_max=self._room.reserves,
        )

    def validate(self, request: EngineRequest) -> None:
        """Raises RequestError when `request` can never run here. Queues nothing."""
        model, prompt = self.config.model, request.prompt_token_ids
        validate_params(
            request.params,
            vocab_size=model.shape.vocab,
            max_model_len=model.max_model_len,
            prompt_len=len(prompt),
            max_logprobs=self.config.max_logprobs,
        )
        if min(prompt) < 0 or max(prompt) >= model.shape.vocab:
            raise RequestError(f"prompt token ids must be between 0 and {model.shape.vocab - 1}", param="prompt")
        if request.deadline_at is not None and not math.isfinite(request.deadline_at):
            raise RequestError(f"deadline_at must be finite, got {request.deadline_at}", param="deadline_at")
        validate_samples(1 + len(request.forks), self.config.scheduler.max_num_seqs)
        if not math.isfinite(request.fair_tag):
            raise RequestError(f"fair_tag must be finite, got {request.fair_tag}", param="fair_tag")
        if request.params.grammar is not None:
            grammar = self._grammars.compile(request.params.grammar).start()
            ends = stop_ids(request.params, model.shape.eos_token_ids)
            check_beginning(request.params, ends, prompt, grammar, model.shape.vocab)
        if request.adapter:
            raise RequestError(f"the adapter {request.adapter} is not loaded", "model_not_found", "model")
        self._room.check(Request.of(request, now=0.0, max_model_len=model.max_model_len, seed=0))

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError when it can never run, its id is in use, or too many wait."""
        self.validate(request)
        now, limit = self._clock(), self.config.model.max_model_len
        self._scheduler.add(Request.of(request, now=now, max_model_len=limit, seed=self._seeds.getrandbits(63)))

    @property
    def room(self) -> int:
        """How many requests may still be queued."""
        return self.config.scheduler.max_waiting - self._scheduler.queued

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks; their last outputs. Unknown ids are ignored."""
        return self._scheduler.abort(request_ids, self._clock())

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step's result is to come."""
        return self._scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Take one step's result, with the next one submitted if there may be two; what it produced.

        Without work it does nothing. A step that raises leaves blocks that are announced and not written: the core
        must not go on, and every later step raises IntegrityError.
        """
        if self._failed:
            raise IntegrityError("an earlier step of this core failed; it cannot go on")
        if not self._scheduler.has_work():
            return []
        self._failed = True
        started = self._clock()
        if not self._in_flight:
            self._runtime.idle_s += started - self._step_ended
        self._submit()
        step = self._in_flight.popleft()
        result = step.handle.result()
        executed = self._clock()
        outputs = self._scheduler.commit(step.plan, result, executed)
        ended = self._step_ended = self._clock()
        if step.plan.tokens:
            self._count(step, result, ended - started, ended - executed)
        self._idle = not (step.plan.tokens or step.plan.told)
        self._failed = False
        return outputs

    @property
    def pause_s(self) -> float:
        """How long nothing can happen unless something arrives or a load ends: seconds that a loop may sleep.

        Infinity while remote KV is all that is waited for; 0 when the last step did anything.
        """
        moment = self._scheduler.wakes_at() if self._idle and not self._in_flight else None
        return 0.0 if moment is None else max(0.0, moment - self._clock())

    def close(self) -> None:
        """Finish the steps that were submitted and end the executor's threads."""
        if isinstance(self._executor, StepThread):
            self._executor.close()
        self._runner.close()

    def _submit(self) -> None:
        """Plan and submit steps until as many as may be are in flight, or nobody can run."""
        while len(self._in_flight) < self.config.scheduler.steps_in_flight:
            started = self._clock()
            plan = self._scheduler.plan(started)
            scheduled = self._clock() - started
            if not plan.tokens and self._in_flight and not plan.told:
                return
            self._in_flight.append(_Step(plan, self._executor.submit(plan), scheduled))
            if not plan.tokens:
                return

    def stats(self) -> CoreStats:
        """Counters since boot and gauges now; copies, which the caller may keep."""
        counters = Counters()
        counters.scheduling.merge(self._scheduler.accounts.scheduling)
        counters.memory.merge(self._scheduler.accounts.memory)
        counters.memory.evictions = self._kv.pool.evictions
        counters.memory.swapped_out, counters.memory.swapped_in = self._kv.swapped_out, self._kv.swapped_in
        counters.memory.offloaded, counters.memory.copied = self._kv.offloaded, self._kv.copied
        counters.service.merge(self._scheduler.accounts.service)
        counters.runtime.merge(self._runtime)
        return CoreStats(counters=counters, gauges=self._gauges())

    def take_kv_events(self) -> KVEventBatch | None:
        """What was stored in and removed from the prefix cache since the last call, or None."""
        events = self._kv.take_events()
        return KVEventBatch(ts=time.time(), events=events) if events else None

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing done, while a request holds any."""
        return self._kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises IntegrityError when scheduler, tables and pool disagree."""
        self._scheduler.check_integrity()

    def _gauges(self) -> Gauges:
        pool, weights = self._kv.pool, self.ready.weight_bytes
        written = pool.touched * self.config.model.shape.kv_bytes_per_token * self.config.cache.block_size
        return Gauges(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_total=pool.usable,
            blocks_used=pool.used,
            blocks_cached=len(pool.index),
            blocks_free=len(pool.free),
            block_size=self.config.cache.block_size,
            kv_slots_empty=self._scheduler.empty_slots,
            host_blocks_total=self._kv.host.size,
            host_blocks_used=self._kv.host.used,
            waiting_for_remote_kv=self._scheduler.waiting_for_remote_kv,
            recent_hit_ratio=self._kv.recent_hits.rate,
            ranks=[
                RankMemory(
                    weights=weights,
                    kv=self.ready.kv_bytes,
                    workspace=max(0, resident_memory() - weights - written),
                    free=available_memory(),
                    total=total_memory(),
                )
            ],
            device=self.config.device,
        )

    def _count(self, step: _Step, result: StepResult, total: float, post: float) -> None:
        """A step took `total` seconds of the loop. Of overlapped steps the parts may add up to more than that."""
        runtime, seconds, plan, shape = self._runtime, result.seconds, step.plan, self.config.model.shape
        runtime.schedule_s += step.scheduled
        runtime.prepare_s += seconds.prepare
        runtime.launch_s += seconds.launch
        runtime.forward_s += seconds.forward
        runtime.sync_s += seconds.sync
        runtime.sample_s += seconds.sample
        runtime.post_s += post
        runtime.flops += shape.step_flops(plan.total_tokens, plan.pairs, len(plan.samples))
        runtime.bytes += self._runner.forward.facts.step_bytes(sampled=len(plan.samples))
        runtime.bytes += shape.kv_bytes_per_token * float(plan.context)
        assert runtime.step_time is not None
        runtime.step_time.record(max(0.0, total))
