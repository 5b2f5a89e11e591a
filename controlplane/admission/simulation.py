"""A pool behind several gateways on a clock that is a number: the very objects that dispatch, with replicas that are
simulated.

Layer: scheduling. Pure. Each gateway has its `Dispatcher`, all of them one `SharedQueue`; a call takes `call_s`, and
output is told every `flush_s`. A replica runs decodes first and then prompts in chunks within its step's budget, the
running ones before the waiting ones, which it orders by (band, fair tag) like the native engine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from controlplane.admission.bands import Band, Lane, lane_of, lane_replicas
from controlplane.admission.dispatch import Credit, Dispatcher, Waiting, rules_of
from controlplane.admission.prediction import StepCost
from controlplane.admission.queue import SharedQueue
from controlplane.admission.turn_messages import Grant, Turn, TurnAnswer
from dataplane.hardware.geometry import StepSize
from dataplane.scheduling.vtc import TokenCharges

LLAMA_8B_LIKE = StepCost(
    step=0.012, tokens=5.5e-5, pairs=2.5e-9, context=4e-8, rows=2e-5, source="round figures near an 8B model", n=0
)
"""A default to play with; give what was fitted on the hardware in question."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One arrival. `again` is issued anew when it ends, as a client that keeps its number of requests does."""

    at: float
    tenant: str
    prompt: int
    output: int
    cached: int = 0
    band: Band = Band.STANDARD
    gateway: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """What is simulated; one knob of it at a time is what a comparison may change.

    `fair` False is the control: one queue by arrival, and no tenants, bands or lanes in it. `long_chunk` is the most of
    a prompt that one step takes (the engine's `long_prefill_threshold`), 0 without a limit.
    """

    replicas: int = 1
    gateways: int = 1
    slots: int = 32
    tokens: int = 65_536
    longest: int = 32_768
    budget: int = 512
    long_chunk: int = 0
    long_prompt: int = 4096
    cost: StepCost = LLAMA_8B_LIKE
    weights: Mapping[str, float] = field(default_factory=dict)
    charges: TokenCharges = field(default_factory=TokenCharges)
    fair: bool = True
    call_s: float = 0.0005
    flush_s: float = 0.05


class ServiceWatch(Protocol):
    """Is told of service when a tenant gets it (tokens times their charge), and after each step of who waits."""

    def charge(self, tenant: str, amount: float) -> None: ...

    def look(self, now: float, waiting: set[str]) -> None: ...


@dataclass(slots=True)
class Simulated:
    """What came of it. Times are simulated seconds; service is in charged tokens, not divided by weight."""

    seconds: float = 0.0
    tokens: int = 0
    finished: int = 0
    service: dict[str, float] = field(default_factory=dict)
    ttft: dict[str, list[float]] = field(default_factory=dict)
    unsent: float = 0.0
    """The most output charges, divided by weight, that the gateways kept back at once: S."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class _Running:
    __slots__ = ("computed", "generated", "origin", "request", "tag")

    def __init__(self, request: Waiting, origin: SimulatedRequest, tag: float) -> None:
        self.request = request
        self.origin = origin
        self.tag = tag
        self.computed = request.cached
        self.generated = 0


@dataclass(slots=True)
class _Replica:
    slots: int
    budget: int
    long_chunk: int
    cost: StepCost
    running: list[_Running] = field(default_factory=list)
    waiting: list[_Running] = field(default_factory=list)
    busy: bool = False
    chunks: dict[str, int] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def long(self) -> bool:
        return any(each.request.lane is Lane.LONG for each in itertools.chain(self.running, self.waiting))

    def begin(self) -> float:
        """Plan a step; how long it takes, in seconds."""
        self.waiting.sort(key=lambda each: (each.request.band, each.tag))
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
        self.chunks = {}
        left = self.budget
        context = 0
        for each in self.running:
            if each.computed >= each.origin.prompt and left:
                self.chunks[each.request.request_id] = 1
                left -= 1
                context += each.computed + each.generated
        size = StepSize(len(self.chunks), context, context, len(self.chunks))
        for each in self.running:
            chunk = min(left, each.origin.prompt - each.computed, self.long_chunk or self.budget)
            if chunk > 0:
                self.chunks[each.request.request_id] = chunk
                left -= chunk
                size += StepSize.prefill(chunk, each.computed, int(each.computed + chunk == each.origin.prompt))
        self.busy = bool(self.chunks)
        return self.cost.seconds(size, 1.0)


class Simulation:
    """Runs `requests` until `until` or to their end."""

    def __init__(self, pool: SimulatedPool, watch: ServiceWatch | None = None) -> None:
        self.pool = pool
        self.result = Simulated()
        self._watch = watch
        self._queue = SharedQueue()
        self._gateways = [Dispatcher(f"g{i}", pool.charges, pool.weights) for i in range(pool.gateways)]
        self._calling = [False] * pool.gateways
        self._replicas = [_Replica(pool.slots, pool.budget, pool.long_chunk, pool.cost) for _ in range(pool.replicas)]
        self._rules = rules_of(Credit(pool.slots, pool.tokens, pool.longest) for _ in range(pool.replicas))
        if not pool.fair:
            self._rules = rules_of([Credit(pool.slots * pool.replicas, pool.tokens * pool.replicas, 0)])
        self._origins: dict[str, tuple[SimulatedRequest, Waiting]] = {}
        self._waiting: dict[str, int] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = itertools.count()
        self._flushing = [False] * pool.gateways

    def run(self, requests: Iterable[SimulatedRequest], until: float = math.inf) -> Simulated:
        """Simulate; requests may come in any order."""
        for request in requests:
            self._at(request.at, partial(self._arrive, request))
        now = 0.0
        while self._events and self._events[0][0] <= until:
            now, _, event = heapq.heappop(self._events)
            event(now)
        self.result.seconds = until if until < math.inf else now
        return self.result

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), event))

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        pool = self.pool
        uncached = request.prompt - request.cached
        waiting = Waiting(
            request_id=f"{next(self._serial)}",
            tenant=request.tenant if pool.fair else "",
            lane=lane_of(uncached, pool.long_prompt) if pool.fair else Lane.SHORT,
            band=request.band if pool.fair else Band.STANDARD,
            deadline_at=now,
            uncached=uncached,
            cached=request.cached,
            output=request.output,
        )
        self._origins[waiting.request_id] = (request, waiting)
        self._waiting[request.tenant] = self._waiting.get(request.tenant, 0) + 1
        self._gateways[request.gateway].add(waiting)
        self._call(request.gateway, now)

    def _call(self, gateway: int, now: float) -> None:
        """Take a turn, unless one is in the air: then what is new goes with the next."""
        dispatcher = self._gateways[gateway]
        if self._calling[gateway] or not dispatcher.news:
            return
        self._calling[gateway] = True
        message = dispatcher.message(self._rules)
        self._at(now + self.pool.call_s / 2, lambda then: self._take(gateway, message, then))

    def _take(self, gateway: int, message: Turn, now: float) -> None:
        answer = self._queue.turn(message, now)
        back = now + self.pool.call_s / 2
        for other in answer.poked:
            self._at(back, partial(self._poked, int(other[1:].partition("#")[0])))
        self._at(back, lambda then: self._heard(gateway, answer, then))

    def _poked(self, gateway: int, now: float) -> None:
        if not self._calling[gateway]:
            self._calling[gateway] = True
            message = self._gateways[gateway].message(self._rules)
            self._at(now + self.pool.call_s / 2, lambda then: self._take(gateway, message, then))
        else:
            self._at(now + self.pool.call_s / 2, lambda then: self._poked(gateway, then))

    def _heard(self, gateway: int, answer: TurnAnswer, now: float) -> None:
        self._calling[gateway] = False
        dispatched = self._gateways[gateway].answered(answer)
        for grant in dispatched.grants:
            self._dispatch(grant, now)
        self._call(gateway, now)

    def _dispatch(self, grant: Grant, now: float) -> None:
        origin, request = self._origins[grant.request_id]
        self._waiting[origin.tenant] -= 1
        self._serve(origin.tenant, self.pool.charges.of(request.uncached, request.cached, 0))
        with_long = [place for place, each in enumerate(self._replicas) if each.long]
        places = lane_replicas(request.lane, len(self._replicas), with_long)
        replica = min((self._replicas[place] for place in places), key=lambda each: each.load)
        replica.waiting.append(_Running(request, origin, grant.tag))
        if not replica.busy:
            self._step(replica, now)

    def _step(self, replica: _Replica, now: float) -> None:
        seconds = replica.begin()
        if replica.busy:
            self._at(now + seconds, lambda then: self._stepped(replica, then))

    def _stepped(self, replica: _Replica, now: float) -> None:
        ended = []
        for each in replica.running:
            chunk = replica.chunks.get(each.request.request_id, 0)
            if not chunk:
                continue
            if each.computed < each.origin.prompt:
                each.computed += chunk
                self.result.tokens += chunk
                if each.computed < each.origin.prompt:
                    continue
                self.result.ttft.setdefault(each.origin.tenant, []).append(now - each.request.deadline_at)
            self._token(each, now)
            if each.generated == each.origin.output:
                ended.append(each)
        for each in ended:
            replica.running.remove(each)
            self._end(each, now)
        if self._watch is not None:
            self._watch.look(now, {tenant for tenant, count in self._waiting.items() if count})
        self.result.unsent = max(self.result.unsent, sum(gateway.unsent for gateway in self._gateways))
        self._step(replica, now)

    def _token(self, each: _Running, now: float) -> None:
        gateway = each.origin.gateway
        each.generated += 1
        self.result.tokens += 1
        self._serve(each.origin.tenant, self.pool.charges.of(0, 0, 1))
        self._gateways[gateway].produced(each.request.request_id, 1)
        if not self._flushing[gateway]:
            self._flushing[gateway] = True
            self._at(now + self.pool.flush_s, lambda then: self._flush(gateway, then))

    def _flush(self, gateway: int, now: float) -> None:
        self._flushing[gateway] = False
        self._call(gateway, now)

    def _end(self, each: _Running, now: float) -> None:
        origin = each.origin
        self.result.finished += 1
        del self._origins[each.request.request_id]
        self._gateways[origin.gateway].end(each.request.request_id)
        self._call(origin.gateway, now)
        if origin.again:
            self._arrive(origin, now)

    def _serve(self, tenant: str, amount: float) -> None:
        self.result.service[tenant] = self.result.service.get(tenant, 0.0) + amount
        if self._watch is not None:
            self._watch.charge(tenant, amount)


def flood(tenant: str, pool: SimulatedPool, *, at_once: int, prompt: int, output: int) -> list[SimulatedRequest]:
    """A tenant that always has `at_once` requests at each gateway."""
    return [
        SimulatedRequest(0.0, tenant, prompt, output, gateway=gateway, again=True)
        for gateway in range(pool.gateways)
        for _ in range(at_once)
    ]


@dataclass(frozen=True, slots=True)
class FairnessPrice:
    """Tokens per second, prompts and outputs, with the fair order and by arrival alone, over the same requests."""

    fair: float
    by_arrival: float

    @property
    def price(self) -> float:
        """The share of throughput that fairness costs; negative when it gains."""
        return 1.0 - self.fair / self.by_arrival

    def sentence(self) -> str:
        """For a table or a terminal."""
        return (
            f"fairness costs {self.price:.2%} of throughput: {self.fair:,.0f} against {self.by_arrival:,.0f} tokens/s"
        )


def price_of_fairness(pool: SimulatedPool, requests: list[SimulatedRequest], until: float) -> FairnessPrice:
    """Run the same requests in both orders."""
    fair = Simulation(replace(pool, fair=True)).run(requests, until)
    by_arrival = Simulation(replace(pool, fair=False)).run(requests, until)
    return FairnessPrice(fair.tokens_per_s, by_arrival.tokens_per_s)
