"""Who runs this step, with how many tokens.

Layer: scheduling. Pure: no I/O, no clock, no torch; time is an argument. One counter drives everything: a step
gives each request `min(budget left, tokens wanted − tokens computed)`, so that whole prefill, chunk, decode
and prefix hit are one case. Running requests come before waiting ones; when blocks run out the newest running
request is preempted and recomputed later, so the oldest always gets on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from dataplane.decoding.stop import stop_ids, take_until_stop
from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from dataplane.protocol import RequestOutput
from dataplane.request import FINISH_REASONS, Request, RequestError, RequestState
from dataplane.scheduling.accounting import Accounting
from dataplane.scheduling.config import SchedulerConfig
from dataplane.scheduling.plan import NewRequest, Plan, RunningRequest, StepResult
from dataplane.scheduling.queues import WaitingQueue


@dataclass(slots=True)
class _Draft:
    """A plan while it is being made."""

    budget: int
    tokens: dict[str, int] = field(default_factory=dict)
    samples: set[str] = field(default_factory=set)
    new: list[NewRequest] = field(default_factory=list)
    running: list[RunningRequest] = field(default_factory=list)
    prefill: int = 0
    pairs: int = 0
    context: int = 0


class Scheduler:
    """Continuous batching with chunked prefill over one `KVManager`, which it alone uses.

    `plan` advances `computed` at once, so a further plan may be made before the result of this one is in;
    `commit` takes results in the order of their plans.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, *, eos_token_ids: Iterable[int] = ()) -> None:
        self.config = config
        self.kv = kv
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.accounts = Accounting()
        self._eos = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._dropped: list[str] = []
        self._scrub: list[int] = []
        self._admissions = 0
        self._watermark = math.ceil(config.watermark * kv.pool.usable)

    # ---------------------------------------------------------------------------------------------- arrivals, exits

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never run here."""
        if request.request_id in self._requests:
            raise RequestError(f"the request id {request.request_id} is in use", "duplicate_request_id", "request_id")
        room = self.kv.pool.usable * self.kv.block_size
        if request.most_tokens > room:
            raise RequestError(
                f"the KV pool holds {room} tokens; the request may need {request.most_tokens}",
                "context_length_exceeded",
                "max_tokens",
            )
        if len(self.waiting) >= self.config.max_waiting:
            raise RequestError(f"{len(self.waiting)} requests are waiting already", "engine_overloaded")
        self._requests[request.request_id] = request
        self.waiting.push(request)

    def abort(self, request_ids: Iterable[str], now: float) -> list[RequestOutput]:
        """End requests wherever they stand and free their blocks. Unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                outputs.append(self._finish(request, RequestState.FINISHED_ABORTED, now))
        return outputs

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    # ------------------------------------------------------------------------------------------------------- planning

    def plan(self, now: float) -> Plan:
        """The next step. An empty plan (no tokens) means that nothing can run."""
        draft = _Draft(self.config.max_num_batched_tokens)
        preempted = self._plan_running(draft, now)
        if not preempted:
            self._admit(draft, now)
        budget = self.config.max_num_batched_tokens
        step = self.accounts.planned(budget - draft.budget, budget)
        dropped, self._dropped = self._dropped, []
        scrub, self._scrub = self._scrub, []
        return Plan(
            step=step,
            tokens=draft.tokens,
            samples=frozenset(draft.samples),
            new=tuple(draft.new),
            running=tuple(draft.running),
            dropped=tuple(dropped),
            scrub=tuple(scrub),
            transfers=self.kv.take_transfers(),
            prefill_tokens=draft.prefill,
            pairs=draft.pairs,
            context=draft.context,
        )

    def _plan_running(self, draft: _Draft, now: float) -> bool:
        """Give running requests their tokens, oldest first. True if one had to be preempted."""
        preempted, index = False, 0
        while index < len(self.running) and draft.budget > 0:
            request = self.running[index]
            count = self._share(request.wanted - request.computed, draft.budget)
            if count > 0:
                self._accrue(request, now)
                blocks = self.kv.allocate(request, count)
                while blocks is None and self.running[-1] is not request:
                    self._preempt(self.running[-1], now)
                    preempted = True
                    blocks = self.kv.allocate(request, count)
                if blocks is None:
                    self._preempt(request, now)
                    return True
                draft.running.append(RunningRequest(request.request_id, blocks, request.computed))
                self._schedule(draft, request, count)
            index += 1
        return preempted

    def _admit(self, draft: _Draft, now: float) -> None:
        """Start waiting requests in order, until one does not fit.

        An admission leaves the watermark free, so that those who run can grow; the first one need not, or a
        request as large as the pool would never start.
        """
        while draft.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if request is None:
                return
            match = self.kv.match(request)
            cached = match.tokens
            count = self._share(request.wanted - cached, draft.budget)
            keep_free = self._watermark if self.running else 0
            if self.kv.allocate(request, count, match, keep_free=keep_free) is None:
                return
            self.waiting.pop()
            self._start(request, cached, now)
            draft.new.append(
                NewRequest(
                    request_id=request.request_id,
                    tokens=list(request.tokens),
                    prompt_len=request.prompt_len,
                    params=request.params,
                    seed=request.seed,
                    stop_ids=stop_ids(request.params, tuple(self._eos)),
                    blocks=self.kv.table(request.request_id),
                    computed=request.computed,
                )
            )
            self._schedule(draft, request, count)

    def _share(self, wanted: int, budget: int) -> int:
        threshold = self.config.long_prefill_threshold
        return min(wanted, budget, threshold) if threshold else min(wanted, budget)

    def _start(self, request: Request, cached: int, now: float) -> None:
        """A waiting request begins to run, with `cached` tokens found in the prefix cache."""
        first = request.state is RequestState.WAITING
        request.move(RequestState.RUNNING)
        request.computed = cached
        request.kv_since = now
        self.running.append(request)
        if first:
            self._admissions += 1
            request.admission = self._admissions
            request.scheduled = now
            request.cached = cached
        if self.kv.prefix_caching:
            self.accounts.looked_up(request, cached, first=first)

    def _schedule(self, draft: _Draft, request: Request, count: int) -> None:
        """Put `count` tokens of `request` into the step."""
        start, end = request.computed, request.computed + count
        draft.budget -= count
        draft.tokens[request.request_id] = count
        if start < request.wanted - 1 or request.generated == 0:
            draft.prefill += count
        if end == request.wanted:
            draft.samples.add(request.request_id)
        draft.pairs += count * start + count * (count + 1) // 2
        draft.context += end
        request.computed = end
        self.accounts.computed(request)

    def _preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks; it starts over later, before those that never ran."""
        self._accrue(request, now)
        self.running.remove(request)
        self.kv.free(request)
        request.move(RequestState.PREEMPTED)
        request.computed = 0
        request.preemptions += 1
        self._dropped.append(request.request_id)
        self.waiting.push_front(request)
        self.accounts.preempted()

    # --------------------------------------------------------------------------------------------------------- results

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[RequestOutput]:
        """Take the result of `plan`: append tokens, end what ended. Requests gone meanwhile are passed over."""
        self.accounts.charge_time(plan, result.seconds.total, self._requests)
        outputs = []
        for request_id in plan.tokens:
            request = self._requests.get(request_id)
            if request is None:
                continue
            error = result.errors.get(request_id)
            if error is not None:
                request.error = error
                outputs.append(self._finish(request, RequestState.FINISHED_ERROR, now))
            elif request_id in plan.samples:
                outputs.append(self._take(request, result.tokens[request_id], plan.prefill_tokens > 0, now))
        return outputs

    def _take(self, request: Request, sampled: list[int], with_prefill: bool, now: float) -> RequestOutput:
        tokens, state, stop_reason = take_until_stop(request, sampled, self._eos)
        self.accounts.generated(request, len(tokens), now, with_prefill=with_prefill)
        if state is not None:
            return self._finish(request, state, now, tokens, stop_reason)
        return self._output(request, tokens)

    def _finish(
        self,
        request: Request,
        state: RequestState,
        now: float,
        tokens: list[int] | None = None,
        stop_reason: int | None = None,
    ) -> RequestOutput:
        if request.state is RequestState.RUNNING:
            self._accrue(request, now)
            self.running.remove(request)
            self._dropped.append(request.request_id)
            if state is RequestState.FINISHED_ERROR:
                self._scrub += self.kv.discard(request)
            else:
                self.kv.free(request)
        else:
            self.waiting.remove(request)
        request.move(state)
        del self._requests[request.request_id]
        self.accounts.finished(request)
        return self._output(request, tokens or [], stop_reason)

    def _output(self, request: Request, tokens: list[int], stop_reason: int | None = None) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            token_ids=tokens,
            finish=FINISH_REASONS.get(request.state),
            stop_reason=stop_reason,
            cached_tokens=request.cached,
            timing=request.timing,
            preemptions=request.preemptions,
            kv_block_seconds=request.kv_block_seconds,
            device_seconds=request.device_seconds,
            error=request.error,
        )

    def _accrue(self, request: Request, now: float) -> None:
        """Charge the blocks held so far, before their number changes."""
        self.accounts.charge_blocks(request, self.kv.held(request.request_id), now)

    @property
    def empty_slots(self) -> int:
        """Slots in held blocks that no token fills: internal waste, below one block per running request."""
        size = self.kv.block_size
        return sum(self.kv.held(request.request_id) * size - request.computed for request in self.running)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queues, tables and pool agree."""
        self.kv.check_integrity()
        for request in self.running:
            held = self.kv.held(request.request_id) * self.kv.block_size
            if request.state is not RequestState.RUNNING or request.computed > min(request.wanted, held):
                raise IntegrityError(
                    f"request {request.request_id} is running with {held} slots, {request.computed} used"
                )
        for request in self.waiting:
            if self.kv.held(request.request_id) or request.computed:
                raise IntegrityError(f"request {request.request_id} waits and holds blocks")
        if len(self.running) + len(self.waiting) != len(self._requests):
            raise IntegrityError("a request is neither running nor waiting")
        if len(self.running) > self.config.max_num_seqs:
            raise IntegrityError(f"{len(self.running)} requests run, {self.config.max_num_seqs} may")
        if not self.running and self.kv.pool.used:
            raise IntegrityError(f"{self.kv.pool.used} blocks are held while nobody runs")
