"""A plan while it is being made.

Layer: scheduling. Pure. It adds up what the scheduler puts into a step; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dataplane.memory.manager import KVManager
from dataplane.request import Request
from dataplane.scheduling.plan import NewRequest, Plan, RemoteLoad, RunningRequest


@dataclass(slots=True)
class Draft:
    """One step. `ahead` says that further steps may be planned before its result is in."""

    budget: int
    ahead: bool
    tokens: dict[str, int] = field(default_factory=dict)
    samples: set[str] = field(default_factory=set)
    new: list[NewRequest] = field(default_factory=list)
    running: list[RunningRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    parents: list[Request] = field(default_factory=list)
    """Requests whose prompt this step completes, and that have forks to start."""
    preempted: bool = False
    """Whether anyone lost its blocks for this step."""
    prefill: int = 0
    pairs: int = 0
    context: int = 0

    def schedule(self, request: Request, count: int) -> None:
        """Put `count` tokens of `request` into the step. A sample it yields is a placeholder until its value is in."""
        start = request.computed
        end = request.computed = start + count
        wanted = len(request.tokens) + request.placeholders
        request_id = request.request_id
        self.budget -= count
        self.tokens[request_id] = count
        self.requests.append(request)
        if start < wanted - 1 or wanted == request.prompt_len:
            self.prefill += count
        if end == wanted:
            self.samples.add(request_id)
            request.placeholders += self.ahead
            if request.forks and end == request.prompt_len:
                self.parents.append(request)
        self.pairs += count * start + count * (count + 1) // 2
        self.context += end

    def decode(self, requests: Sequence[Request]) -> None:
        """What `schedule` does for one token after the last sampled one, of each of `requests`."""
        context, ahead = 0, self.ahead
        for request in requests:
            request.computed = end = request.computed + 1
            context += end
            if ahead:
                request.placeholders += 1
        ids = [request.request_id for request in requests]
        self.budget -= len(ids)
        self.tokens.update(dict.fromkeys(ids, 1))
        self.samples.update(ids)
        self.requests += requests
        self.pairs += context
        self.context += context

    def begin(self, request: Request, kv: KVManager, stop_ids: tuple[int, ...], parent: str = "") -> None:
        """Send `request` whole, as it stands before its tokens are scheduled."""
        self.new.append(
            NewRequest(
                request_id=request.request_id,
                tokens=list(request.tokens),
                prompt_len=request.prompt_len,
                params=request.params,
                seed=request.seed,
                stop_ids=stop_ids,
                blocks=kv.table(request.request_id),
                computed=request.computed,
                parent=parent,
            )
        )

    def fork(self, child: Request) -> None:
        """A fork starts: no tokens of its own in this step, and a sample."""
        self.samples.add(child.request_id)
        self.requests.append(child)
        child.placeholders += self.ahead

    def finish(self, step: int, kv: KVManager, dropped: list[str], loads: list[RemoteLoad]) -> Plan:
        """The plan. What is to be cleared is asked for before the moves give back what they read."""
        scrub = kv.take_scrub()
        return Plan(
            step=step,
            tokens=self.tokens,
            samples=frozenset(self.samples),
            new=tuple(self.new),
            running=tuple(self.running),
            dropped=tuple(dropped),
            scrub=tuple(scrub),
            transfers=kv.take_transfers(),
            loads=tuple(loads),
            prefill_tokens=self.prefill,
            pairs=self.pairs,
            context=self.context,
        )
