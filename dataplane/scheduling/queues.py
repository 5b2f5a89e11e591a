"""The waiting queue.

Layer: scheduling. Pure. Order: priority (lower first), then requests that were preempted, then the policy of the
queue: arrival, a gateway's fair tag, or one of the modules beside this. It orders; it does not admit.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dataplane.request import Request
from dataplane.scheduling.cache_order import CacheOrder
from dataplane.scheduling.config import QueueOrder, SchedulerConfig
from dataplane.scheduling.heap import Key, LazyHeap
from dataplane.scheduling.vtc import TokenCharges, VTCOrder


class Order(Protocol):
    """A policy: who goes first among the new requests of one priority.

    What it popped it hears of until `finished`: preempted and resumed requests stand before it, in no order of its.
    """

    @property
    def settled(self) -> bool:
        """Nobody waits and nobody it admitted runs: a new order may take its place."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def push(self, request: Request) -> None: ...

    def peek(self, now: float = 0.0) -> Request | None: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def served(self, request: Request, input_tokens: int, cached_tokens: int, output_tokens: int) -> None: ...

    def finished(self, request: Request) -> None: ...


class Queue(Protocol):
    """What the scheduler asks of a waiting queue."""

    by_service: bool
    """Whether service has a say in the order; if not, it need not be told of."""

    def __len__(self) -> int: ...

    def __contains__(self, request_id: str) -> bool: ...

    def __iter__(self) -> Iterator[Request]:
        """In order of service, if nothing else arrived. Don't change the queue while walking through it."""

    def push(self, request: Request) -> None:
        """Queue a new request."""

    def push_front(self, request: Request) -> None:
        """Queue a preempted request before all new ones of its priority, the earlier admission first."""

    def peek(self, now: float = 0.0) -> Request | None:
        """Who is next. A later `now` (seconds) than before lets a policy look at what changed meanwhile."""

    def pop(self) -> Request:
        """Take out who is next: whom `peek` named last. The queue must not be empty."""

    def remove(self, request: Request) -> None:
        """Take out one request, wherever it stands."""

    def served(
        self, request: Request, *, input_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        """Charge service. At its first admission: prompt tokens to compute and, apart, those found in the cache
        (a recompute serves nobody anew). After each step: tokens generated."""

    def finished(self, request: Request) -> None:
        """The request is over, however it ended and wherever it stood; nothing is charged to it any more."""


class KeyOrder:
    """Requests by a key that never changes: first come, first served, or a tag. Service is of no account."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._requests: LazyHeap[Request] = LazyHeap()

    @property
    def settled(self) -> bool:
        return not self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        self._requests.put(request.request_id, self._key(request), request)

    def peek(self, now: float = 0.0) -> Request | None:
        return self._requests.first()

    def pop(self) -> Request:
        request = self._requests.first()
        assert request is not None
        return self._requests.remove(request.request_id)

    def remove(self, request: Request) -> None:
        self._requests.remove(request.request_id)

    def served(self, request: Request, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        pass

    def finished(self, request: Request) -> None:
        pass


def fcfs() -> KeyOrder:
    """First come, first served."""
    return KeyOrder(lambda request: (request.queued,))


def fair_tag() -> KeyOrder:
    """By the tag a gateway supplied, lower first; equal tags are first come, first served."""
    return KeyOrder(lambda request: (request.fair_tag, request.queued))


@dataclass(slots=True)
class _Band:
    """The requests of one priority."""

    order: Order
    preempted: LazyHeap[Request] = field(default_factory=LazyHeap)

    def __len__(self) -> int:
        return len(self.preempted) + len(self.order)


class WaitingQueue:
    """Bands by priority; in each one those that were preempted, and then a policy's order.

    Every call is O(log n) in the requests that wait, plus what the policy says of itself.
    """

    def __init__(self, make_order: Callable[[], Order] = fair_tag, *, by_service: bool = True) -> None:
        self._make_order = make_order
        self.by_service = by_service
        self._bands: dict[int, _Band] = {}
        self._ready: list[int] = []  # priorities that have somebody waiting, ascending
        self._preempted: dict[str, bool] = {}  # who waits, and whether among the preempted

    def __len__(self) -> int:
        return len(self._preempted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._preempted

    def __iter__(self) -> Iterator[Request]:
        for priority in self._ready:
            yield from self._bands[priority].preempted
            yield from self._bands[priority].order

    def push(self, request: Request) -> None:
        self._enter(request, preempted=False).order.push(request)

    def push_front(self, request: Request) -> None:
        self._enter(request, preempted=True).preempted.put(request.request_id, (request.admission,), request)

    def peek(self, now: float = 0.0) -> Request | None:
        if not self._ready:
            return None
        band = self._bands[self._ready[0]]
        return band.preempted.first() or band.order.peek(now)

    def pop(self) -> Request:
        band = self._bands[self._ready[0]]
        request = band.preempted.first()
        if request is None:
            request = band.order.pop()
        else:
            band.preempted.remove(request.request_id)
        self._leave(request, band)
        return request

    def remove(self, request: Request) -> None:
        band = self._bands[request.priority]
        if self._preempted[request.request_id]:
            band.preempted.remove(request.request_id)
        else:
            band.order.remove(request)
        self._leave(request, band)

    def served(
        self, request: Request, *, input_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        band = self._bands.get(request.priority)
        if band is not None:
            band.order.served(request, input_tokens, cached_tokens, output_tokens)

    def finished(self, request: Request) -> None:
        band = self._bands.get(request.priority)
        if band is not None:
            band.order.finished(request)
            self._forget(request.priority, band)

    def _enter(self, request: Request, *, preempted: bool) -> _Band:
        assert request.request_id not in self._preempted
        self._preempted[request.request_id] = preempted
        band = self._bands.get(request.priority)
        if band is None:
            band = self._bands[request.priority] = _Band(self._make_order())
        if not len(band):
            bisect.insort(self._ready, request.priority)
        return band

    def _leave(self, request: Request, band: _Band) -> None:
        del self._preempted[request.request_id]
        if not len(band):
            del self._ready[bisect.bisect_left(self._ready, request.priority)]
        self._forget(request.priority, band)

    def _forget(self, priority: int, band: _Band) -> None:
        if not band.preempted and band.order.settled:
            del self._bands[priority]


def make_queue(
    config: SchedulerConfig,
    weights: Mapping[str, float] | None = None,
    hit_ratio: Callable[[Request], float] | None = None,
) -> Queue:
    """The queue that `config.order` asks for.

    `weights`: a tenant's share of service, 1 where it is not named (vtc). `hit_ratio`: the share of a request's
    tokens that the prefix cache holds now, 0 to 1 (cache_aware). Raises ValueError for a weight that is not positive,
    and for an order by hits without the ratio.
    """
    for tenant, weight in (weights or {}).items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of tenant {tenant!r} must be positive, got {weight}")
    match config.order:
        case QueueOrder.FCFS:
            return WaitingQueue(fcfs, by_service=False)
        case QueueOrder.FAIR_TAG:
            return WaitingQueue(fair_tag, by_service=False)
        case QueueOrder.VTC:
            charges = TokenCharges(config.input_charge, config.cached_charge, config.output_charge)
            return WaitingQueue(lambda: VTCOrder(charges, weights or {}))
        case QueueOrder.CACHE_AWARE:
            if hit_ratio is None:
                raise ValueError("an order by cache hits needs to be told the hit ratios")
            ratio = hit_ratio
            return WaitingQueue(lambda: CacheOrder(ratio), by_service=False)
