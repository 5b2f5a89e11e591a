"""Who runs this step, with how many tokens.

Layer: scheduling. Pure: no I/O, no clock, no torch; time is an argument. One counter drives everything: a step
gives each request `min(budget left, tokens wanted − tokens computed)`, so that whole prefill, chunk, decode
and prefix hit are one case. The order is Sarathi's: decodes, unfinished prefills, admissions. When blocks run out the
last of the running requests (lowest priority, newest) gives its own up, so the first always gets on. Where requests
stand, and what moving them takes, is in roster.py.
"""

from __future__ import annotations

import math
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
        return draft.finish(step, self.kv, dropped, self._loads.take_asked())

    def wakes_at(self) -> float | None:
        """When (seconds) a plan may have tokens though nothing happens until then; None if at any moment or never.

        Infinity means that only the end of a load, or an arrival, can change anything. Only to be asked after a plan
        that was empty and told the executor nothing, with no step in flight.
        """
        if self.running:
            return None
        moments = [moment for moment in (self.batching.opens_at, self._deadlines.next_at) if moment is not None]
        return min(moments, default=math.inf if self._loads.loading else None)

    def _plan_running(self, draft: Draft, now: float) -> bool:
        """Give running requests their tokens: decodes first, then unfinished prefills. False if one went without."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            placeholders = request.placeholders
            wanted = len(request.tokens) + placeholders
            left = wanted - request.computed
            if left == 1 and wanted != request.prompt_len:
                if not placeholders or wanted <= request.most_tokens:
                    decodes.append(request)
            elif left > 0:
                prefills.append(request)
        if not self._plan_decodes(draft, decodes, now):
            return False
        for request in prefills:
            if draft.budget <= 0:
                break
            if request.state is RequestState.RUNNING:
                count = self._share(request.wanted - request.computed, draft.budget)
                if not self._run(draft, request, count, now):
                    return False
        return not draft.preempted

    def _plan_decodes(self, draft: Draft, decodes: list[Request], now: float) -> bool:
        """One token for each, in order. False if one went without.

        Most of what runs is here, so it is done many at a time: those that have room, and those that are given it.
        """
        room, granted, done = self._room, 0, 0
        quick = not (room.grows or room.promised)
        while done < len(decodes) and draft.budget > done - granted:
            if quick:
                done += self.kv.extend(decodes, done, granted + draft.budget)
                if done == len(decodes) or draft.budget == done - granted:
                    break
            request = decodes[done]
            reserve = room.tokens(request) if room.reserves else 0
            running = request.state is RequestState.RUNNING
            if quick and running and (blocks := self.kv.allocate(request, 1, reserve=reserve)) is not None:
                self._grown(draft, request, blocks, now)
                done += 1
                continue
            draft.decode(decodes[granted:done])
            done = granted = done + 1
            if running and not self._run(draft, request, 1, now) and request.state is RequestState.RUNNING:
                return False
        draft.decode(decodes[granted:done])
        return True

    def _run(self, draft: Draft, request: Request, count: int, now: float) -> bool:
        """Put a running request into the step, with the blocks it needs. False if there are none."""
        room = self._room
        reserve = room.tokens(request) if room.reserves else 0
        blocks = self.kv.allocate(request, count, reserve=reserve)
        while blocks is None:
            if not self._make_room(draft, request, now):
                return False
            blocks = self.kv.allocate(request, count, reserve=reserve)
        if room.promised and not request.forks:
            room.keep(request)
        if request.computed + 1 == len(request.tokens) + request.placeholders > request.prompt_len:
            self._grown(draft, request, blocks, now)
            draft.decode([request])
        else:
            self._grown(draft, request, blocks, now, prefill=True)
            draft.schedule(request, count)
            self.accounts.computed(request)
        return True

    def _grown(self, draft: Draft, request: Request, blocks: list[int], now: float, *, prefill: bool = False) -> None:
        """A running request was given room: charge it, and tell the executor what it cannot know."""
        request_id = request.request_id
        if blocks:
            self.accounts.charge_blocks(request, self.kv.held(request_id) - len(blocks), now)
        replaced = self.kv.take_replaced(request_id)
        if blocks or replaced or prefill:
            draft.running.append(RunningRequest(request_id, blocks, request.computed, replaced))

    def _make_room(self, draft: Draft, request: Request, now: float) -> bool:
        """Free somebody's blocks for `request`: of those who were loaded and wait, or of the last who runs.

        Who is itself the last gives its own up, but for a prefill beside others in the step, which waits with what it
        has. False: no more to gain.
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
            if request is None:
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
        if not kv.trusts(request):
            self._forget_computed(request, now)
        swapped, loaded = kv.is_swapped(request_id), request_id in self._loads.loaded
        forks = 0 if loaded else self._room.forks(request)  # promised when it was loaded
        keep_free = self._room.keep_free(alone=not self.running, forks=forks)
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
        live = self._landed(plan, result)
        seconds = result.seconds.total
        self.accounts.charge_time(plan, seconds, live)
        self.preemption.observe(plan, seconds)
        for request_id, logprobs in result.prompt_logprobs.items():
            if (request := self._requests.get(request_id)) is not None and request.state is RequestState.RUNNING:
                request.prompt_logprobs += logprobs
        for request_id, error in result.errors.items():
            if (request := self._requests.get(request_id)) is not None and request.state is RequestState.RUNNING:
                request.error, request.refusal = error, result.refusals.get(request_id)
                outputs += self._end(request, RequestState.FINISHED_ERROR, now)
        return outputs + self._take(live, plan, result, now)

    def _landed(self, plan: Plan, result: StepResult) -> list[Request]:
        """Those of a step who still run, now that its result is in. The others may have waited for it to end."""
        running = RequestState.RUNNING
        landed = self._flights.land(plan.step)
        if failed := result.errors.keys() - result.refusals.keys():
            # Before anyone's blocks are free: who shared them may have left meanwhile.
            self.kv.distrust([request for request in landed if request.request_id in failed])
        live = [request for request in landed if request.state is running]
        if len(live) < len(landed):
            for request in landed:
                if request.state is not running:
                    self.accounts.wasted(plan.tokens.get(request.request_id, 0))
                    if not request.in_flight:
                        del self._flights.leaving[request.request_id]
                        self.kv.free(request)
        return live

    def _take(self, live: list[Request], plan: Plan, result: StepResult, now: float) -> list[RequestOutput]:
        """The tokens that running requests yielded. What is between a request's first output and its last is tokens."""
        samples, errors, sampled, eos, ahead = plan.samples, result.errors, result.tokens, self._eos, self._ahead
        taken = []
        for request in live:
            request_id = request.request_id
            if request_id in samples and request_id not in errors:
                if ahead:
                    request.placeholders -= 1
                taken.append((request, *take_until_stop(request, sampled[request_id], eos)))
        self.accounts.generated(taken, now, with_prefill=plan.prefill_tokens > 0)
        if self.waiting.by_service:
            for request, tokens, _, _ in taken:
                self.waiting.served(request, output_tokens=len(tokens))
        outputs, scored = [], result.logprobs
        for request, tokens, state, stop_reason in taken:
            if state is None and not scored and len(request.tokens) - request.prompt_len > len(tokens):
                outputs.append(RequestOutput(request_id=request.request_id, token_ids=tokens))
                continue
            if state is not None:
                self._finish(request, state, now)
            logprobs = scored.get(request.request_id, [])[: len(tokens)]
            outputs.append(self._output(request, tokens, stop_reason, logprobs))
        return outputs

    def _share(self, wanted: int, budget: int) -> int:
        threshold = self.config.long_prefill_threshold
        return min(wanted, budget, threshold) if threshold else min(wanted, budget)
