"""Who runs this step, with how many tokens.

Layer: scheduling. Pure: no I/O, no clock, no torch; time is an argument. One counter drives everything: a step
gives each request `min(budget left, tokens wanted − tokens computed)`, so that whole prefill, chunk, decode
and prefix hit are one case. The order is Sarathi's: decodes, unfinished prefills, admissions. When blocks run out the
last of the running requests (lowest priority, newest) gives its own up, so the first always gets on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from dataplane.decoding.stop import stop_ids, take_until_stop
from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from dataplane.memory.tables import NO_MATCH, PrefixMatch
from dataplane.protocol import RequestOutput, TokenLogprob
from dataplane.request import FINISH_REASONS, Request, RequestError, RequestState, validate_samples
from dataplane.scheduling.accounting import Accounting
from dataplane.scheduling.batching import make_policy
from dataplane.scheduling.capacity import Reserve, Room
from dataplane.scheduling.config import Preemption, SchedulerConfig
from dataplane.scheduling.connector import KVConnector, Loads
from dataplane.scheduling.deadlines import Deadlines
from dataplane.scheduling.draft import Draft
from dataplane.scheduling.flights import Flights
from dataplane.scheduling.plan import Plan, RunningRequest, StepResult
from dataplane.scheduling.preemption import PreemptionPolicy, PrefillSeconds
from dataplane.scheduling.queues import make_queue

DEADLINE_EXCEEDED = "deadline_exceeded: the request waited for longer than its deadline allows"


def _rank(request: Request) -> tuple[int, int]:
    """The order of running requests: by priority, then by first admission."""
    return request.priority, request.admission


class Scheduler:
    """Batches requests over one `KVManager`, which it alone uses.

    `plan` advances `computed` at once, so a further plan may be made before the result of this one is in: with
    `config.steps_in_flight` above 1 it counts on the tokens to come (placeholders). `commit` takes results in the order
    of their plans; a plan without tokens need not be committed. A request that is in flight is never preempted: whoever
    needs its blocks waits for the result. `kv_bytes` (of one token) and `prefill_seconds` are what preemption costs.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        *,
        eos_token_ids: Iterable[int] = (),
        kv_bytes: int = 0,
        prefill_seconds: PrefillSeconds | None = None,
        reserve: Reserve | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.waiting = make_queue(config, config.tenant_weights, self._hit_ratio)
        self.running: list[Request] = []
        self.accounts = Accounting()
        self.batching = make_policy(config, lambda request: kv.match(request).tokens)
        self.preemption = PreemptionPolicy(config, kv_bytes, prefill_seconds)
        self._room = Room(config, kv.pool.usable, kv.block_size, reserve)
        self._loads = Loads(connector)
        self._flights = Flights()
        self._deadlines = Deadlines()
        self._eos = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._parents: dict[str, Request] = {}
        self._forks_to_come = 0
        self._outputs: list[RequestOutput] = []
        self._dropped: list[str] = []
        self._scrub: list[int] = []
        self._admissions = 0
        self._ahead = config.steps_in_flight > 1

    # ---------------------------------------------------------------------------------------------- arrivals, exits

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never run here."""
        for request_id in (request.request_id, *request.forks):
            if request_id in self._requests or request_id in self._parents:
                raise RequestError(f"the request id {request_id} is in use", "duplicate_request_id", "request_id")
        if len({request.request_id, *request.forks}) <= len(request.forks):
            raise RequestError("a request and its forks need different ids", "duplicate_request_id", "request_id")
        validate_samples(request.seats, self.config.max_num_seqs)
        self._room.check(request)
        if self.queued >= self.config.max_waiting:
            raise RequestError(f"{self.queued} requests are waiting already", "engine_overloaded")
        self._requests[request.request_id] = request
        self._parents.update(dict.fromkeys(request.forks, request))
        self._deadlines.watch(request)
        self.waiting.push(request)
        self.batching.queued(request)

    def abort(self, request_ids: Iterable[str], now: float) -> list[RequestOutput]:
        """End requests wherever they stand and free their blocks, those of a step in flight when it is done.

        A fork whose prompt is not computed ends with its parent, or alone. Unknown ids are ignored.
        """
        outputs = []
        for request_id in request_ids:
            if request_id in self._requests:
                outputs += self._end(self._requests[request_id], RequestState.FINISHED_ABORTED, now)
            elif request_id in self._parents:
                outputs.append(self._give_up(request_id, RequestState.FINISHED_ABORTED))
        return outputs

    def has_work(self) -> bool:
        """Whether a request is unfinished, a result is to come, or an output was not given out."""
        return bool(self._requests or self._flights or self._outputs or self._loads.loading)

    @property
    def queued(self) -> int:
        """Requests that wait, for a place or for remote KV."""
        return len(self.waiting) + len(self._loads.loading)

    @property
    def waiting_for_remote_kv(self) -> int:
        return len(self._loads.loading)

    def wakes_at(self) -> float | None:
        """When (seconds) a plan may have tokens though nothing happens until then; None if at any moment or never.

        Only to be asked after an empty plan, with no step in flight.
        """
        if self.running or self._loads.loading:
            return None
        moments = [moment for moment in (self.batching.opens_at, self._deadlines.next_at) if moment is not None]
        return min(moments, default=None)

    # ------------------------------------------------------------------------------------------------------- planning

    def plan(self, now: float) -> Plan:
        """The next step. An empty plan (no tokens) means that nothing can run now."""
        draft = Draft(self.config.max_num_batched_tokens, ahead=self._ahead)
        self._expire(now)
        self._take_loaded()
        if self._plan_running(draft, now):
            self._admit(draft, now)
        for parent in draft.parents:
            self._fork(draft, parent, now)
        step = self.accounts.planned(sum(draft.tokens.values()), self.config.max_num_batched_tokens)
        if draft.tokens:
            self._flights.start(step, draft.requests)
        dropped, self._dropped = self._dropped, []
        scrub, self._scrub = self._scrub, []
        return draft.finish(step, self.kv, dropped, scrub)

    def _plan_running(self, draft: Draft, now: float) -> bool:
        """Give running requests their tokens: decodes first, then unfinished prefills. False if one went without."""
        prefills = []
        index, running = 0, self.running
        while index < len(running) and draft.budget > 0:
            request = running[index]
            wanted = len(request.tokens) + request.placeholders
            left = min(wanted, request.most_tokens) - request.computed
            if left > 1 or (left == 1 and wanted == request.prompt_len):
                prefills.append(request)
            elif left == 1 and not self._run(draft, request, 1, now) and request.state is RequestState.RUNNING:
                return False
            index += 1
        for request in prefills:
            if draft.budget <= 0:
                break
            if request.state is RequestState.RUNNING:
                count = self._share(request.wanted - request.computed, draft.budget)
                if not self._run(draft, request, count, now):
                    return False
        return not draft.preempted

    def _run(self, draft: Draft, request: Request, count: int, now: float) -> bool:
        """Put a running request into the step, with the blocks it needs. False if there are none."""
        reserve = self._room.tokens(request)
        blocks = self.kv.allocate(request, count, reserve=reserve)
        while blocks is None:
            if not self._make_room(draft, request, now):
                return False
            blocks = self.kv.allocate(request, count, reserve=reserve)
        if blocks:
            held = self.kv.held(request.request_id) - len(blocks)
            self.accounts.charge_blocks(request, held, now)
        if self._room.promises and not request.forks:
            self._room.keep(request)
        replaced = self.kv.take_replaced(request.request_id)
        draft.running.append(RunningRequest(request.request_id, blocks, request.computed, replaced))
        draft.schedule(request, count)
        self.accounts.computed(request)
        return True

    def _make_room(self, draft: Draft, request: Request, now: float) -> bool:
        """Free somebody's blocks for `request`: of those who were loaded and wait, or of the last who runs.

        A decode that is itself the last gives its own up; a prefill waits with what it has. False: no more to gain.
        """
        if self._loads.loaded:
            self._unload(next(reversed(self._loads.loaded.values())), now)
            return True
        victim = next(other for other in reversed(self.running) if other.request_id not in draft.tokens)
        if victim.in_flight or (victim is request and draft.tokens and request.computed < request.wanted - 1):
            return False
        self._preempt(victim, now)
        draft.preempted = True
        return victim is not request

    def _admit(self, draft: Draft, now: float) -> None:
        """Start waiting requests in order, until one does not fit."""
        self.batching.open(now, len(self.running), self.waiting)
        while draft.budget > 0:
            request = self.batching.candidate(self.waiting)
            if request is None or self._lingers(request.request_id):
                return
            if len(self.running) + self._forks_to_come + request.seats > self.config.max_num_seqs:
                return
            while not self._begin(draft, request, now):
                others = [other for other in self._loads.loaded.values() if other is not request]
                if self.running or not others:
                    self.batching.full()
                    return
                self._unload(others[-1], now)

    def _begin(self, draft: Draft, request: Request, now: float) -> bool:
        """Start one waiting request, or the load of its remote KV. False if it does not fit.

        An admission leaves the watermark free, so that those who run can grow; the first one need not, or a
        request as large as the pool would never start.
        """
        request_id, match, kv = request.request_id, NO_MATCH, self.kv
        swapped, loaded = kv.is_swapped(request_id), request_id in self._loads.loaded
        keep_free = self._room.keep_free(alone=not self.running, forks=self._room.forks(request))
        if loaded:
            self._accrue(request, now)
        elif not swapped:
            match = kv.match(request)
            if remote := self._loads.matched(request, match.tokens):
                return self._load(request, match, remote, keep_free, now)
        have = match.tokens or request.computed
        count, reserve = self._share(request.wanted - have, draft.budget), self._room.tokens(request)
        if swapped:
            blocks = kv.swap_in(request, count, keep_free=keep_free, reserve=reserve)
        else:
            blocks = kv.allocate(request, count, match, keep_free=keep_free, reserve=reserve)
        if blocks is None:
            return False
        self._unqueue(request, now)
        self._start(request, have, match, now, found=not swapped)
        draft.begin(request, kv, self._stop_ids(request))
        draft.schedule(request, count)
        self.accounts.computed(request)
        return True

    def _start(self, request: Request, have: int, match: PrefixMatch, now: float, *, found: bool) -> None:
        """A waiting request begins to run with `have` tokens; `found` says that they were looked for in the cache."""
        first = request.scheduled is None
        self.batching.joined(request)
        self._loads.loaded.pop(request.request_id, None)
        self._number(request)
        request.move(RequestState.RUNNING)
        request.computed, request.kv_since = have, now
        insort(self.running, request, key=_rank)
        self._forks_to_come += request.seats - 1
        self._room.promise(request, self._room.forks(request))
        if first:
            request.scheduled = now
            request.cached, request.host_cached = have, match.host_tokens
            self.waiting.served(request, input_tokens=request.wanted - have, cached_tokens=have)
        if found and self.kv.prefix_caching and request.read_cache:
            self.accounts.looked_up(request, have, match.host_tokens, first=first)

    def _fork(self, draft: Draft, parent: Request, now: float) -> None:
        """The prompt's last token is in the step: the further samples start, on the same blocks."""
        self._forks_to_come -= parent.seats - 1
        for number, request_id in enumerate(parent.forks, 1):
            if not request_id:
                continue
            child = parent.fork(request_id, number)
            del self._parents[request_id]
            self._requests[request_id] = child
            self.kv.fork(parent, child)
            self._number(child)
            child.kv_since = now
            insort(self.running, child, key=_rank)
            if reserve := self._room.tokens(child):
                self.kv.allocate(child, 0, reserve=reserve)
                self._room.promise(child, int(child.prompt_len % self.kv.block_size > 0))
            draft.begin(child, self.kv, self._stop_ids(child), parent.request_id)
            draft.fork(child)
        self._room.keep(parent)
        parent.forks = ()

    def _load(self, request: Request, match: PrefixMatch, remote: int, keep_free: int, now: float) -> bool:
        """Begin to load `remote` tokens that follow what the cache has. False if there is no room for them."""
        have, size = match.tokens, self.kv.block_size
        reserve = max(have + remote, self._room.tokens(request))
        blocks = self.kv.allocate(request, 0, match, keep_free=keep_free, reserve=reserve)
        if blocks is None:
            return False
        self._unqueue(request, now)
        self._number(request)
        request.move(RequestState.WAITING_FOR_REMOTE_KV)
        request.computed, request.kv_since = have, now
        self._loads.start(request, blocks[have // size : (have + remote) // size], remote)
        return True

    def _take_loaded(self) -> None:
        """Requests whose remote KV is here stand in the queue again, before those that never began."""
        for request, tokens in self._loads.take():
            if request.state is RequestState.WAITING_FOR_REMOTE_KV:
                request.computed += tokens
                request.move(RequestState.WAITING)
                self._loads.loaded[request.request_id] = request
                self._requeue(request)
            else:
                self.kv.free(request)

    def _unload(self, request: Request, now: float) -> None:
        """Take the blocks of a request that was loaded and waits; it will be loaded or computed again."""
        self._accrue(request, now)
        del self._loads.loaded[request.request_id]
        self.kv.free(request)
        request.computed = 0

    def _preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks; it comes back later, before those that never ran."""
        self._leave_running(request, now)
        how = Preemption.RECOMPUTE
        if self.preemption.swaps(request.computed) and self.kv.swap_out(request):
            how = Preemption.SWAP
        else:
            self.kv.free(request)
            request.computed = 0
            request.prompt_logprobs.clear()
        request.move(RequestState.PREEMPTED)
        request.preemptions += 1
        if request.first_token is None:
            self._deadlines.watch(request)
        self._requeue(request)
        self.accounts.preempted(how)

    # --------------------------------------------------------------------------------------------------------- results

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[RequestOutput]:
        """Take the result of `plan`: append tokens, end what ended. Requests gone meanwhile are passed over."""
        outputs, self._outputs = self._outputs, []
        if not plan.tokens:
            return outputs
        live = []
        for request in self._flights.land(plan.step):
            if request.state is RequestState.RUNNING:
                live.append(request)
                continue
            self.accounts.wasted(plan.tokens.get(request.request_id, 0))
            if not request.in_flight:
                del self._flights.leaving[request.request_id]
                self._release(request)
        seconds = result.seconds.total
        self.accounts.charge_time(plan, seconds, live)
        self.preemption.observe(plan, seconds)
        for request in live:
            if request.request_id in result.prompt_logprobs:
                request.prompt_logprobs += result.prompt_logprobs[request.request_id]
            if request.request_id in result.errors:
                request.error = result.errors[request.request_id]
                outputs += self._end(request, RequestState.FINISHED_ERROR, now)
            elif request.request_id in plan.samples:
                outputs.append(self._take(request, result, now, with_prefill=plan.prefill_tokens > 0))
        return outputs

    def _take(self, request: Request, result: StepResult, now: float, *, with_prefill: bool) -> RequestOutput:
        """A running request yielded tokens."""
        request.placeholders -= self._ahead
        tokens, state, stop_reason = take_until_stop(request, result.tokens[request.request_id], self._eos)
        self.accounts.generated(request, len(tokens), now, with_prefill=with_prefill)
        self.waiting.served(request, output_tokens=len(tokens))
        if state is not None:
            self._finish(request, state, now)
        logprobs = result.logprobs.get(request.request_id, [])[: len(tokens)] if result.logprobs else []
        return self._output(request, tokens, stop_reason, logprobs)

    def _expire(self, now: float) -> None:
        """End requests that still wait for their first token past their deadline, with an error."""
        for request in self._deadlines.due(now):
            if request.state is not RequestState.RUNNING and request.first_token is None:
                request.error = DEADLINE_EXCEEDED
                self._outputs += self._end(request, RequestState.FINISHED_ERROR, now)

    def _end(self, request: Request, state: RequestState, now: float) -> list[RequestOutput]:
        """End a request wherever it stands, and the forks it was to have."""
        forks = [self._give_up(request_id, state) for request_id in request.forks if request_id]
        self._finish(request, state, now)
        return [self._output(request, []), *forks]

    def _give_up(self, request_id: str, state: RequestState) -> RequestOutput:
        """End a fork before its prompt is computed."""
        parent = self._parents.pop(request_id)
        number = parent.forks.index(request_id)
        child = parent.fork(request_id, number + 1)
        child.move(state)
        parent.forks = (*parent.forks[:number], "", *parent.forks[number + 1 :])
        if parent.state is RequestState.RUNNING:
            self._forks_to_come -= 1
        return self._output(child, [])

    def _finish(self, request: Request, state: RequestState, now: float) -> None:
        """Take a request out of wherever it stands. Its blocks stay while a step or a load writes to them."""
        where = request.state
        request.move(state)
        del self._requests[request.request_id]
        self._deadlines.forget(request)
        if where is RequestState.RUNNING:
            self._leave_running(request, now)
        elif where is not RequestState.WAITING_FOR_REMOTE_KV:
            self._loads.loaded.pop(request.request_id, None)
            self.waiting.remove(request)
            self.batching.left(request)
        self.waiting.finished(request)
        self.accounts.finished(request)
        if request.in_flight:
            self._flights.leaving[request.request_id] = request
        elif where is not RequestState.WAITING_FOR_REMOTE_KV:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Give a finished request's blocks back; those of a failed one hold nothing that may be read."""
        if request.state is RequestState.FINISHED_ERROR:
            self._scrub += self.kv.discard(request)
        else:
            self.kv.free(request)

    def _output(
        self,
        request: Request,
        tokens: list[int],
        stop_reason: int | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> RequestOutput:
        prompt_logprobs = None
        if tokens and request.prompt_logprobs:
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
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
            logprobs=list(logprobs),
            prompt_logprobs=prompt_logprobs,
            host_tokens=request.host_cached,
        )

    # ------------------------------------------------------------------------------------------------------- internals

    def _share(self, wanted: int, budget: int) -> int:
        threshold = self.config.long_prefill_threshold
        return min(wanted, budget, threshold) if threshold else min(wanted, budget)

    def _lingers(self, request_id: str) -> bool:
        """Whether an earlier request of this id ended and still holds blocks."""
        return request_id in self._flights.leaving or request_id in self._loads.loading

    def _number(self, request: Request) -> None:
        if request.admission < 0:
            self._admissions += 1
            request.admission = self._admissions

    def _requeue(self, request: Request) -> None:
        self.waiting.push_front(request)
        self.batching.queued(request)

    def _unqueue(self, request: Request, now: float) -> None:
        """Take an admitted request out of the queue; a policy may have chosen one that is not its head."""
        if self.waiting.peek(now) is request:
            self.waiting.pop()
        else:
            self.waiting.remove(request)
        self.batching.left(request)

    def _leave_running(self, request: Request, now: float) -> None:
        """A running request stops running: its executor's row, its forks' seats and its promises are given up."""
        self._accrue(request, now)
        self.running.remove(request)
        self._forks_to_come -= request.seats - 1
        self._room.keep(request)
        self._dropped.append(request.request_id)

    def _accrue(self, request: Request, now: float) -> None:
        """Charge the blocks held so far, before their number changes."""
        self.accounts.charge_blocks(request, self.kv.held(request.request_id), now)

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return stop_ids(request.params, tuple(self._eos))

    def _hit_ratio(self, request: Request) -> float:
        return self.kv.match(request).tokens / request.wanted

    @property
    def empty_slots(self) -> int:
        """Slots in held blocks that no token fills: internal waste, below one block per running request on demand."""
        return self.kv.empty_slots

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queues, tables, pool and steps in flight agree."""
        self.kv.check_integrity()
        self._flights.check_integrity()
        kv, size = self.kv, self.kv.block_size
        for request in self.running:
            held = kv.held(request.request_id) * size
            if request.state is not RequestState.RUNNING or request.computed > min(request.wanted, held):
                raise IntegrityError(
                    f"request {request.request_id} is running with {held} slots, {request.computed} used"
                )
        if self.running != sorted(self.running, key=_rank):
            raise IntegrityError("running requests are out of order")
        for request in self.waiting:
            request_id = request.request_id
            away = kv.is_swapped(request_id) or request_id in self._loads.loaded or self._lingers(request_id)
            if request.placeholders or (not away and (kv.held(request_id) or request.computed)):
                raise IntegrityError(f"request {request_id} waits and holds blocks")
        loading = [request for request in self._loads.loading.values() if not request.state.finished]
        if len(self.running) + len(self.waiting) + len(loading) != len(self._requests):
            raise IntegrityError("a request is neither running nor waiting")
        forks = sum(request.seats - 1 for request in self.running)
        if forks != self._forks_to_come or len(self.running) + forks > self.config.max_num_seqs:
            raise IntegrityError(
                f"{len(self.running)} requests run and {forks} forks come, {self.config.max_num_seqs} may"
            )
        holders = self.running or self._loads.loading or self._loads.loaded or self._flights.leaving
        if not holders and kv.pool.used:
            raise IntegrityError(f"{kv.pool.used} blocks are held while nobody runs")
