"""Who runs this step, with how many tokens.

Layer: scheduling. Pure: no I/O, no clock, no torch; time is an argument. One counter drives everything: a step
gives each request `min(budget left, tokens wanted − tokens computed)`, so that whole prefill, chunk, decode
and prefix hit are one case. The order is Sarathi's: decodes, unfinished prefills, admissions. When blocks run out the
last of the running requests (lowest priority, newest) gives its own up, so the first always gets on. Where requests
stand, and what moving them takes, is in roster.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.decoding.stop import take_until_stop
from dataplane.memory.manager import KVManager
from dataplane.memory.tables import NO_MATCH
from dataplane.protocol import RequestOutput
from dataplane.request import Request, RequestState
from dataplane.scheduling.capacity import Reserve, Room
from dataplane.scheduling.config import SchedulerConfig
from dataplane.scheduling.connector import KVConnector, Loads
from dataplane.scheduling.draft import Draft
from dataplane.scheduling.plan import Plan, RunningRequest, StepResult
from dataplane.scheduling.preemption import PreemptionPolicy, PrefillSeconds
from dataplane.scheduling.roster import Roster


class Scheduler(Roster):
    """Batches the requests of a roster, step by step.

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
        room = Room(config, kv.pool.usable, kv.block_size, reserve)
        super().__init__(config, kv, eos=frozenset(eos_token_ids), room=room, loads=Loads(connector))
        self.preemption = PreemptionPolicy(config, kv_bytes, prefill_seconds)
        self._ahead = config.steps_in_flight > 1

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

    def wakes_at(self) -> float | None:
        """When (seconds) a plan may have tokens though nothing happens until then; None if at any moment or never.

        Only to be asked after an empty plan, with no step in flight.
        """
        if self.running or self._loads.loading:
            return None
        moments = [moment for moment in (self.batching.opens_at, self._deadlines.next_at) if moment is not None]
        return min(moments, default=None)

    def _plan_running(self, draft: Draft, now: float) -> bool:
        """Give running requests their tokens: decodes first, then unfinished prefills. False if one went without."""
        prefills = []
        index, running = 0, self.running
        while index < len(running) and draft.budget > 0:
            request = running[index]
            wanted = len(request.tokens) + request.placeholders
            left = wanted - request.computed
            if left > 1 or (left == 1 and wanted == request.prompt_len):
                prefills.append(request)
            elif left == 1 and (not request.placeholders or wanted <= request.most_tokens):
                went = self._run(draft, request, 1, now)
                if not went and request.state is RequestState.RUNNING:
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
        request_id, room = request.request_id, self._room
        reserve = room.tokens(request) if room.reserves else 0
        blocks = self.kv.allocate(request, count, reserve=reserve)
        while blocks is None:
            if not self._make_room(draft, request, now):
                return False
            blocks = self.kv.allocate(request, count, reserve=reserve)
        if blocks:
            self.accounts.charge_blocks(request, self.kv.held(request_id) - len(blocks), now)
        if room.promised and not request.forks:
            room.keep(request)
        replaced = self.kv.take_replaced(request_id)
        draft.running.append(RunningRequest(request_id, blocks, request.computed, replaced))
        if request.computed + 1 == len(request.tokens) + request.placeholders > request.prompt_len:
            draft.decode(request)
        else:
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
        self._preempt(victim, now, swap=self.preemption.swaps(victim.computed))
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
        errors, prompt_logprobs, with_prefill = result.errors, result.prompt_logprobs, plan.prefill_tokens > 0
        for request in live:
            request_id = request.request_id
            if prompt_logprobs and request_id in prompt_logprobs:
                request.prompt_logprobs += prompt_logprobs[request_id]
            if errors and request_id in errors:
                request.error = errors[request_id]
                outputs += self._end(request, RequestState.FINISHED_ERROR, now)
            elif request_id in plan.samples:
                outputs.append(self._take(request, result, now, with_prefill=with_prefill))
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

    def _share(self, wanted: int, budget: int) -> int:
        threshold = self.config.long_prefill_threshold
        return min(wanted, budget, threshold) if threshold else min(wanted, budget)
