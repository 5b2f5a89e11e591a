"""What was served, to whom, and what it took.

Layer: scheduling. Pure. The scheduler reports each event here once; counters only grow. It counts; it decides
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dataplane.protocol import Histogram, MemoryCounters, SchedulingCounters, ServiceCounters, TenantService
from dataplane.request import Request, RequestState
from dataplane.scheduling.config import Preemption
from dataplane.scheduling.plan import Plan

MAX_TENANTS = 1024
OTHER_TENANTS = "other"


class Accounting:
    """Counters since boot, by layer."""

    def __init__(self) -> None:
        self.scheduling = SchedulingCounters()
        self.memory = MemoryCounters()
        self.service = ServiceCounters()

    def planned(self, tokens: int, budget: int) -> int:
        """A step was planned; its number. One in which nobody runs is none, and has the number of the last."""
        if not tokens:
            return self.scheduling.steps
        self.scheduling.steps += 1
        self.scheduling.token_budget += budget
        self.scheduling.tokens_scheduled += tokens
        return self.scheduling.steps

    def looked_up(self, request: Request, found: int, *, first: bool) -> None:
        """`found` of a request's tokens need not be computed as it starts, for the first time or again.

        The request knows which of them its own cache did not hold, or not on the device.
        """
        cached = found - request.found_remotely
        if not first:
            self.memory.recompute_queries += request.wanted
            self.memory.recompute_hits += cached
            return
        self.memory.prefix_queries += request.wanted
        self.memory.prefix_hits += cached
        self.memory.host_hits += request.found_in_host
        self.memory.remote_hits += request.found_remotely
        self.tenant(request.tenant).cached_tokens += found

    def computed(self, request: Request) -> None:
        """Count prompt tokens the first time they are computed or found; a recompute serves nobody anew."""
        served = min(request.computed, request.prompt_len)
        if served > request.served_prompt:
            self.scheduling.prompt_tokens += served - request.served_prompt
            self.tenant(request.tenant).prompt_tokens += served - request.served_prompt
            request.served_prompt = served

    def generated(
        self,
        taken: Iterable[tuple[Request, list[int], RequestState | None, int | None]],
        now: float,
        *,
        with_prefill: bool,
    ) -> None:
        """Each request yielded tokens, and may have ended; the gap before them is kept apart when prefill shared it."""
        total, tenants = 0, self.scheduling.tenants
        for request, tokens, _, _ in taken:
            count = len(tokens)
            if request.first_token is None:
                request.first_token = now
            elif with_prefill and request.last_token is not None:
                if self.service.itl_with_prefill is None:
                    self.service.itl_with_prefill = Histogram()
                self.service.itl_with_prefill.record(max(0.0, now - request.last_token) / count, count)
            request.last_token = now
            total += count
            (tenants.get(request.tenant) or self.tenant(request.tenant)).output_tokens += count
        self.scheduling.output_tokens += total

    def preempted(self, how: Preemption) -> None:
        """A request lost its blocks; `how` it will get its KV back."""
        causes = self.scheduling.preemptions
        causes[how.value] = causes.get(how.value, 0) + 1

    def wasted(self, tokens: int) -> None:
        """A step computed `tokens` tokens for a request that had ended by then."""
        self.scheduling.wasted_tokens += tokens

    def finished(self, request: Request) -> None:
        self.tenant(request.tenant).finished += 1

    def charge_blocks(self, request: Request, held: int, now: float) -> None:
        """Charge `held` blocks since the last time; a shared block is charged to each of its holders."""
        spent = held * max(0.0, now - request.kv_since)
        request.kv_since = now
        request.kv_block_seconds += spent
        self.tenant(request.tenant).kv_block_seconds += spent

    def charge_time(self, plan: Plan, seconds: float, live: Iterable[Request]) -> None:
        """Share a step's time out by tokens scheduled; what a request that is gone used is nobody's."""
        if not plan.tokens:
            return
        total, tokens, tenants = plan.total_tokens, plan.tokens, self.scheduling.tenants
        each = seconds / total
        if not each:
            return
        if total == len(tokens) and not plan.new:
            for request in live:
                request.device_seconds += each
            for name, count in Counter([request.tenant for request in live]).items():
                self.tenant(name).device_seconds += each * count
            return
        for request in live:
            share = each * tokens.get(request.request_id, 0)
            request.device_seconds += share
            (tenants.get(request.tenant) or self.tenant(request.tenant)).device_seconds += share

    def tenant(self, name: str) -> TenantService:
        """A tenant's counters; beyond `MAX_TENANTS` names they are counted together."""
        tenants = self.scheduling.tenants
        found = tenants.get(name)
        if found is not None:
            return found
        return tenants.setdefault(name if len(tenants) < MAX_TENANTS else OTHER_TENANTS, TenantService())
