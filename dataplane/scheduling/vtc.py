"""Fair order among tenants: a virtual token counter each, the least served goes first.

Layer: scheduling. Pure. Source: Sheng et al., Fairness in Serving Large Language Models, algorithm 2. A tenant that
comes back is lifted to the least counter of those that wait, so that idleness earns no credit; input is charged at
the first admission and output per step, each divided by the tenant's weight. It counts service; when to admit is not
its affair.

With `Capacity.RESERVE_MAX`, as in the paper, what is admitted generates no more than memory holds. With U = max(input ·
longest prompt, output · KV tokens of the engine) two tenants that wait throughout then differ in service by 2 U at most
(theorem 4.4), and one that waits throughout is at most 4 U behind any other. On demand there is no such bound: what a
tenant has admitted may generate several times the engine's KV tokens while others wait, above all where requests are
preempted, since these come back before all that never ran, whatever their tenant's counter (`WaitingQueue`). All of it
is charged, and the tenant waits the longer afterwards; a recompute is not, for it serves nobody.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dataplane.request import Request
from dataplane.scheduling.heap import LazyHeap


@dataclass(frozen=True, slots=True)
class TokenCharges:
    """What one token counts for: computed for the prompt, found in the cache, generated."""

    input: float = 1.0
    cached: float = 0.25
    output: float = 2.0

    def of(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        return self.input * input_tokens + self.cached * cached_tokens + self.output * output_tokens


@dataclass(slots=True)
class _Client:
    """One tenant: its counter only grows. `running` are requests it may still be charged for."""

    name: str
    weight: float
    counter: float
    waiting: LazyHeap[Request] = field(default_factory=LazyHeap)
    running: set[str] = field(default_factory=set)


class VTCOrder:
    """Of the tenant with the least counter, the oldest request.

    `served` is O(1). `push`, `pop` and `remove` are O(log n), and `peek` too, amortised: it moves each tenant that was
    charged once. A tenant that is idle and not above the least counter is forgotten: its next request would be
    lifted to that anyway.
    """

    def __init__(self, charges: TokenCharges, weights: Mapping[str, float]) -> None:
        self._charges = charges
        self._weights = weights
        self._clients: dict[str, _Client] = {}
        self._backlog: LazyHeap[_Client] = LazyHeap()  # those with a request waiting, by a counter that may be old
        self._idle: LazyHeap[_Client] = LazyHeap()  # those with none waiting and none running
        self._last: _Client | None = None  # the last that left the backlog
        self._length = 0

    @property
    def settled(self) -> bool:
        return len(self._clients) == len(self._idle)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        """In order of service if nothing is in the prefix cache and nothing generated; starting is O(tenants)."""
        for client in list(self._backlog):
            self._renew(client)
        turns = [
            (client.counter, turn, client, iter(client.waiting)) for turn, client in enumerate(list(self._backlog))
        ]
        later = itertools.count(len(turns))
        while turns:
            counter, _, client, requests = heapq.heappop(turns)
            request = next(requests, None)
            if request is not None:
                yield request
                counter += self._charges.of(request.prompt_len, 0, 0) / client.weight
                heapq.heappush(turns, (counter, next(later), client, requests))

    def push(self, request: Request) -> None:
        client = self._wake(request.tenant)
        client.running.discard(request.request_id)
        if not client.waiting:
            client.counter = max(client.counter, self._floor())
            self._backlog.put(client.name, (client.counter,), client)
        client.waiting.put(request.request_id, (request.queued,), request)
        self._length += 1

    def peek(self, now: float = 0.0) -> Request | None:
        client = self._least()
        return None if client is None else client.waiting.first()

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        client = self._clients[request.tenant]
        client.running.add(request.request_id)
        self._take_out(client, request)
        return request

    def remove(self, request: Request) -> None:
        self._take_out(self._clients[request.tenant], request)

    def served(self, request: Request, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Charge it. A request that never waited here (a fork) counts as running from now on."""
        client = self._clients.get(request.tenant)
        if client is None or request.request_id not in client.running:
            if request.state.finished:
                return
            client = self._wake(request.tenant)
            client.running.add(request.request_id)
        client.counter += self._charges.of(input_tokens, cached_tokens, output_tokens) / client.weight

    def finished(self, request: Request) -> None:
        client = self._clients.get(request.tenant)
        if client is not None:
            client.running.discard(request.request_id)
            self._rest(client)

    def _least(self) -> _Client | None:
        """The waiting tenant with the least counter. Counters only grow, so an old key is a lower bound."""
        while (client := self._backlog.first()) is not None:
            if not self._renew(client):
                return client
        return None

    def _renew(self, client: _Client) -> bool:
        old = self._backlog.key(client.name) != (client.counter,)
        if old:
            self._backlog.put(client.name, (client.counter,), client)
        return old

    def _floor(self) -> float:
        """Where a tenant that comes back starts at least. It never falls."""
        client = self._least() or self._last
        return 0.0 if client is None else client.counter

    def _wake(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(name, self._weights.get(name, 1.0), self._floor())
        elif name in self._idle:
            self._idle.remove(name)
        return client

    def _take_out(self, client: _Client, request: Request) -> None:
        client.waiting.remove(request.request_id)
        self._length -= 1
        if not client.waiting:
            self._backlog.remove(client.name)
            self._last = client
            self._rest(client)

    def _rest(self, client: _Client) -> None:
        """Forget who is idle and could come back with nothing but the floor."""
        if client.name not in self._idle and not client.waiting and not client.running:
            self._idle.put(client.name, (client.counter,), client)
        floor = self._floor()
        while (idle := self._idle.first()) is not None and idle.counter <= floor:
            self._idle.remove(idle.name)
            del self._clients[idle.name]
