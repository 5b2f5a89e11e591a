"""When waiting requests may join those that run, and which of them is next.

Layer: scheduling. Pure. One policy per mode of `Batching`. A policy says who may join; whether there is room for it is
the scheduler's affair. Requests that were preempted, or left to have remote KV loaded, belong to their batch still, so
every policy lets them back in.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from dataplane.request import Request, RequestState
from dataplane.scheduling.config import Batching, QueueOrder, SchedulerConfig
from dataplane.scheduling.heap import LazyHeap
from dataplane.scheduling.queues import KeyOrder, Queue, fair_tag, fcfs


class BatchPolicy(Protocol):
    """Asked once per step (`open`), and then for one candidate after the other until there is none."""

    def open(self, now: float, running: int, waiting: Queue) -> None:
        """A step is planned at `now` (seconds) while `running` requests run."""

    def candidate(self, waiting: Queue) -> Request | None:
        """Who may join now; None ends the admissions of this step."""

    def joined(self, request: Request) -> None:
        """The candidate was let in."""

    def full(self) -> None:
        """The candidate found no room."""

    def queued(self, request: Request) -> None:
        """A request was put into the queue, for the first time or again."""

    def left(self, request: Request) -> None:
        """A request left the queue, admitted or not."""

    opens_at: float | None
    """When (seconds) the policy will let somebody in though nothing else happens; None if it waits for no time."""


class Continuous:
    """Whoever is next joins at the next step (Orca's iteration-level scheduling)."""

    def __init__(self) -> None:
        self._now = 0.0
        self.opens_at: float | None = None

    def open(self, now: float, running: int, waiting: Queue) -> None:
        self._now = now

    def candidate(self, waiting: Queue) -> Request | None:
        return waiting.peek(self._now)

    def joined(self, request: Request) -> None:
        pass

    def full(self) -> None:
        pass

    def queued(self, request: Request) -> None:
        pass

    def left(self, request: Request) -> None:
        pass


class Static(Continuous):
    """A batch of those who wait when nobody runs; the next one when all of it has ended, the preempted too.

    Its members are settled when it begins: who comes later takes nobody's seat, not even that of a member who gave
    up. The batch is filled over as many steps as the token budget takes, and closed early when memory is full. A
    request takes a seat for each of its samples; one that takes more than there are is a batch of its own.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        # Members that do not run: never let in (in the queue's order), back in the queue, not in the queue.
        self._new: OrderedDict[str, Request] = OrderedDict()
        self._back: LazyHeap[Request] = LazyHeap()
        self._away: list[Request] = []

    def open(self, now: float, running: int, waiting: Queue) -> None:
        super().open(now, running, waiting)
        self._away = [request for request in self._away if request.state is RequestState.WAITING_FOR_REMOTE_KV]
        if not (running or self._new or self._back or self._away):
            self._new = OrderedDict((request.request_id, request) for request in self._batch(waiting))

    def candidate(self, waiting: Queue) -> Request | None:
        back = self._back.first()
        new = next(iter(self._new.values()), None)
        return new if back is None or (new is not None and new.priority < back.priority) else back

    def queued(self, request: Request) -> None:
        if _is_back(request):
            self._back.put(request.request_id, (request.priority, request.admission), request)

    def left(self, request: Request) -> None:
        if request.request_id in self._back:
            self._back.remove(request.request_id)
        else:
            self._new.pop(request.request_id, None)
        if not request.state.finished:
            self._away.append(request)

    def full(self) -> None:
        self._new.clear()

    def _batch(self, waiting: Queue) -> list[Request]:
        """Those who make the batch that begins now, in the queue's order."""
        members: list[Request] = []
        if waiting.peek(self._now) is None:
            return members
        seats = 0
        for request in waiting:
            seats += request.seats
            if members and seats > self._size:
                break
            members.append(request)
        return members


class Dynamic(Static):
    """A static batch that begins when it is full, or when one of it has waited for `window` seconds."""

    def __init__(self, size: int, window: float) -> None:
        super().__init__(size)
        self._window = window

    def open(self, now: float, running: int, waiting: Queue) -> None:
        self.opens_at = None
        super().open(now, running, waiting)

    def _batch(self, waiting: Queue) -> list[Request]:
        members = super()._batch(waiting)
        if len(members) < len(waiting) or sum(request.seats for request in members) >= self._size:
            return members
        closes = min((request.queued for request in members), default=math.inf) + self._window
        if self._now >= closes:
            return members
        self.opens_at = closes if members else None
        return []


BucketKey = tuple[int, bool, int, int]
MakeOrder = Callable[[], KeyOrder]


class _Bucket:
    """Requests that are alike, by when they were first queued and, where that is one by a key, in the queue's order."""

    def __init__(self, order: KeyOrder | None) -> None:
        self.oldest: LazyHeap[Request] = LazyHeap()
        self.order = order

    def __len__(self) -> int:
        return len(self.oldest)

    def put(self, request: Request) -> None:
        self.oldest.put(request.request_id, (request.queued,), request)
        if self.order is not None:
            self.order.push(request)

    def remove(self, request: Request) -> None:
        self.oldest.remove(request.request_id)
        if self.order is not None:
            self.order.remove(request)

    @property
    def since(self) -> float:
        """When the oldest was queued."""
        request = self.oldest.first()
        assert request is not None
        return request.queued


class Selective(Continuous):
    """Requests that are alike join together: each step admits from one bucket only.

    A bucket holds requests of one priority, phase (new, or back in the queue), length class (powers of two of the
    tokens still to compute) and class of cache hit (none, less than half, more). The fullest bucket is next; but once a
    request has waited for `ageing` seconds, the bucket of whoever is next in the queue, so that none waits longer than
    its order makes it. Lower priorities and those that are back go first, and those of a bucket join in the queue's
    order.

    `make_order` is the queue's order of new requests if it is one by a key that never changes: a bucket then knows who
    is its next. In any other order the queue is walked through twice a step at most: as far as the first of the bucket,
    who often finds no room, and, once that one was let in, as far as the last of up to `seats` more.
    """

    def __init__(
        self, ageing: float, hit_tokens: Callable[[Request], int], seats: int, make_order: MakeOrder | None = None
    ) -> None:
        super().__init__()
        self._ageing = ageing
        self._hit_tokens = hit_tokens
        self._seats = seats
        self._make_order = make_order
        self._buckets: dict[BucketKey, _Bucket] = {}
        self._key_of: dict[str, BucketKey] = {}
        self._chosen: BucketKey | None = None
        self._next: deque[Request] = deque()
        self._look_for = 1

    def open(self, now: float, running: int, waiting: Queue) -> None:
        super().open(now, running, waiting)
        self._chosen = self._choose(waiting)
        self._next.clear()
        self._look_for = 1

    def candidate(self, waiting: Queue) -> Request | None:
        if self._chosen is None or (bucket := self._buckets.get(self._chosen)) is None:
            return None
        if bucket.order is not None:
            return bucket.order.peek()
        if not self._next:
            alike = (request for request in waiting if self._key_of[request.request_id] == self._chosen)
            self._next.extend(islice(alike, min(self._look_for, len(bucket))))
            self._look_for = self._seats
        return self._next[0]

    def queued(self, request: Request) -> None:
        key = self._key(request)
        self._key_of[request.request_id] = key
        if key not in self._buckets:
            self._buckets[key] = _Bucket(self._order(request))
        self._buckets[key].put(request)

    def left(self, request: Request) -> None:
        if self._next and self._next[0] is request:
            self._next.popleft()
        key = self._key_of.pop(request.request_id)
        self._buckets[key].remove(request)
        if not self._buckets[key]:
            del self._buckets[key]

    def _key(self, request: Request) -> BucketKey:
        """Where a request belongs, by what the cache holds now."""
        hits = self._hit_tokens(request)
        share = 0 if not hits else 1 if 2 * hits < request.wanted else 2
        return request.priority, not _is_back(request), (request.wanted - hits).bit_length(), share

    def _order(self, request: Request) -> KeyOrder | None:
        """The queue's order of those that are like `request`."""
        if _is_back(request):
            return KeyOrder(lambda request: (request.admission,))
        return None if self._make_order is None else self._make_order()

    def _choose(self, waiting: Queue) -> BucketKey | None:
        if not self._buckets:
            return None
        band = min(key[:2] for key in self._buckets)
        since = {key: bucket.since for key, bucket in self._buckets.items() if key[:2] == band}
        head = waiting.peek(self._now)
        if head is not None and self._now - min(since.values()) >= self._ageing:
            return self._key_of[head.request_id]
        return min(since, key=lambda key: (-len(self._buckets[key]), since[key]))


def _is_back(request: Request) -> bool:
    """Whether it was preempted or its remote KV was loaded: the queue puts it before those that never began."""
    return request.admission >= 0


def make_policy(config: SchedulerConfig, hit_tokens: Callable[[Request], int]) -> BatchPolicy:
    """The policy of `config.batching`. `hit_tokens` says how much of a request the prefix cache holds."""
    size = config.batch_size or config.max_num_seqs
    match config.batching:
        case Batching.CONTINUOUS:
            return Continuous()
        case Batching.STATIC:
            return Static(size)
        case Batching.DYNAMIC:
            return Dynamic(size, config.batch_window_s)
        case Batching.SELECTIVE:
            make_order = {QueueOrder.FCFS: fcfs, QueueOrder.FAIR_TAG: fair_tag}.get(config.order)
            return Selective(config.bucket_ageing_s, hit_tokens, config.max_num_seqs, make_order)
