"""Every request the engine knows, where it stands, and the moves from one place to the next.

Layer: scheduling. Pure. A move keeps queue, running list, blocks, steps in flight, loads, seats and counters in step
with one another; when a move is made, and for whom, the scheduler decides.

    add → waiting ⇄ running → gone                 gone: its blocks stay while a step or a load still writes to them
             ↕         │
          loading      └ forks start beside their parent
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from dataplane.decoding.stop import stop_ids
from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from dataplane.memory.tables import PrefixMatch
from dataplane.protocol import RequestOutput, TokenLogprob
from dataplane.request import FINISH_REASONS, Request, RequestError, RequestState, validate_samples
from dataplane.scheduling.accounting import Accounting
from dataplane.scheduling.batching import make_policy
from dataplane.scheduling.capacity import Room
from dataplane.scheduling.config import Preemption, SchedulerConfig
from dataplane.scheduling.connector import Loads
from dataplane.scheduling.deadlines import Deadlines
from dataplane.scheduling.draft import Draft
from dataplane.scheduling.flights import Flights
from dataplane.scheduling.queues import make_queue

DEADLINE_EXCEEDED = "deadline_exceeded: the request waited for longer than its deadline allows"


def _rank(request: Request) -> tuple[int, int]:
    """The order of running requests: by priority, then by first admission."""
    return request.priority, request.admission


class Roster:
    """The requests over one `KVManager`, which it alone uses. `Scheduler` is a roster that plans steps."""

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, *, eos: frozenset[int], room: Room, loads: Loads
    ) -> None:
        self.config = config
        self.kv = kv
        self.waiting = make_queue(config, config.tenant_weights, self._hit_ratio)
        self.running: list[Request] = []
        self.accounts = Accounting()
        self.batching = make_policy(config, lambda request: kv.match(request).tokens)
        self._eos = eos
        self._room = room
        self._loads = loads
        self._flights = Flights()
        self._deadlines = Deadlines()
        self._requests: dict[str, Request] = {}
        self._parents: dict[str, Request] = {}
        self._forks_to_come = 0
        self._outputs: list[RequestOutput] = []
        self._dropped: list[str] = []
        self._admissions = 0

    # -------------------------------------------------------------------------------------------------- arrivals, exits

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never run here."""
        for request_id in (request.request_id, *request.forks):
            if request_id in self._requests or request_id in self._parents or self._lingers(request_id):
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

    # ------------------------------------------------------------------------------------------------------------ moves

    def _start(self, request: Request, have: int, match: PrefixMatch, now: float, *, found: bool) -> None:
        """A waiting request begins to run with `have` tokens; `found` says that they were looked for in the cache."""
        first = request.scheduled is None
        self.batching.joined(request)
        if self._loads.loaded.pop(request.request_id, None) is None:
            request.found_in_host, request.found_remotely = match.host_tokens, 0
        self._number(request)
        request.move(RequestState.RUNNING)
        request.computed, request.kv_since = have, now
        insort(self.running, request, key=_rank)
        self._forks_to_come += request.seats - 1
        self._room.promise(request, self._room.forks(request))
        if first:
            request.scheduled = now
            request.cached, request.host_cached = have, request.found_in_host
            self.waiting.served(request, input_tokens=request.wanted - have, cached_tokens=have)
        if found and self.kv.prefix_caching and request.read_cache:
            self.accounts.looked_up(request, have, first=first)
            if first:
                self.kv.recent_hits.observe(1, request.wanted, have - request.found_remotely)

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
        """Have `remote` tokens loaded that follow what the cache has. False if there is no room for them."""
        have, size = match.tokens, self.kv.block_size
        reserve = max(have + remote, self._room.tokens(request))
        blocks = self.kv.allocate(request, 0, match, keep_free=keep_free, reserve=reserve)
        if blocks is None:
            return False
        self._unqueue(request, now)
        self._number(request)
        request.move(RequestState.WAITING_FOR_REMOTE_KV)
        request.computed, request.kv_since = have, now
        request.found_in_host = match.host_tokens
        self._room.promise(request, self._room.forks(request))
        self._loads.ask(request, blocks, have // size, (have + remote) // size)
        return True

    def _take_loaded(self) -> None:
        """Requests whose remote KV is here stand in the queue again, before those that never began.

        What a load that failed left in its blocks is not to be trusted.
        """
        for request, load, loaded in self._loads.take():
            whole = loaded // self.kv.block_size
            tokens = whole * self.kv.block_size
            self.kv.scrub(load.blocks[whole:])
            if request.state is RequestState.WAITING_FOR_REMOTE_KV:
                request.computed += tokens
                request.found_remotely = tokens
                request.move(RequestState.WAITING)
                self._loads.loaded[request.request_id] = request
                self._requeue(request)
            else:
                self.kv.free(request)

    def _unload(self, request: Request, now: float) -> None:
        """Take the blocks of a request that was loaded and waits; it will be loaded or computed again."""
        self._accrue(request, now)
        del self._loads.loaded[request.request_id]
        self._room.keep(request)
        self.kv.free(request)
        request.computed = 0

    def _forget_computed(self, request: Request, now: float) -> None:
        """What a waiting request has, loaded or swapped out, is not to be trusted: it starts from nothing."""
        if request.request_id in self._loads.loaded:
            self._unload(request, now)
        else:
            self.kv.drop_swapped(request)
            request.computed = 0
            request.prompt_logprobs.clear()

    def _preempt(self, request: Request, now: float, *, swap: bool) -> None:
        """Take a running request's blocks, to host memory if `swap` and it has room; it comes back before new ones."""
        self._leave_running(request, now)
        how = Preemption.RECOMPUTE
        if swap and self.kv.swap_out(request):
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

    # ------------------------------------------------------------------------------------------------------------- ends

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
        running = parent.state is RequestState.RUNNING
        self._forks_to_come -= running
        if running or parent.request_id in self._room.promised:
            self._room.keep(parent)
            self._room.promise(parent, self._room.forks(parent))
        self.accounts.finished(child)
        return self._output(child, [])

    def _finish(self, request: Request, state: RequestState, now: float) -> None:
        """Take a request out of wherever it stands. Its blocks stay while a step or a load writes to them."""
        where = request.state
        request.move(state)
        del self._requests[request.request_id]
        self._deadlines.forget(request)
        if where is RequestState.RUNNING:
            self._leave_running(request, now)
        else:
            self._accrue(request, now)
            self._room.keep(request)
        if where not in (RequestState.RUNNING, RequestState.WAITING_FOR_REMOTE_KV):
            self._loads.loaded.pop(request.request_id, None)
            self.waiting.remove(request)
            self.batching.left(request)
        self.waiting.finished(request)
        self.accounts.finished(request)
        if request.in_flight:
            self._flights.leaving[request.request_id] = request
        elif where is not RequestState.WAITING_FOR_REMOTE_KV:
            self.kv.free(request)

    def _output(
        self,
        request: Request,
        tokens: list[int],
        stop_reason: int | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> RequestOutput:
        """What to tell of `tokens`; what is told of the request itself goes with its first output and its last."""
        if request.state is RequestState.RUNNING and len(request.tokens) - request.prompt_len > len(tokens):
            return RequestOutput(request_id=request.request_id, token_ids=tokens, logprobs=tuple(logprobs))
        prompt_logprobs = None
        if tokens and request.prompt_logprobs:
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        return RequestOutput(
            request_id=request.request_id,
            token_ids=tokens,
            finish=None if request.state is RequestState.RUNNING else FINISH_REASONS[request.state],
            stop_reason=stop_reason,
            cached_tokens=request.cached,
            timing=request.timing,
            preemptions=request.preemptions,
            kv_block_seconds=request.kv_block_seconds,
            device_seconds=request.device_seconds,
            error=request.error,
            error_code=request.refusal.code if request.refusal else None,
            error_param=request.refusal.param if request.refusal else None,
            logprobs=tuple(logprobs),
            prompt_logprobs=prompt_logprobs,
            host_tokens=request.host_cached,
        )

    # -------------------------------------------------------------------------------------------------------- internals

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
