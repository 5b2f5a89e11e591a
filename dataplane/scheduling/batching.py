"""When waiting requests may join those that run, and which of them is next.

Layer: scheduling. Pure. One policy per mode of `Batching`. A policy says who may join; whether there is room for it is
the scheduler's affair. Requests that were preempted belong to their batch still, so every policy lets them back in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from dataplane.request import Request, RequestState
from dataplane.scheduling.config import Batching, SchedulerConfig
from dataplane.scheduling.queues import Queue


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

    The batch is filled over as many steps as the token budget takes, and closed early when memory is full.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._seats = 0
        self._preempted: dict[str, Request] = {}

    def open(self, now: float, running: int, waiting: Queue) -> None:
        super().open(now, running, waiting)
        if not running and not self._preempted:
            self._seats = self._batch(waiting.peek(now), waiting)

    def candidate(self, waiting: Queue) -> Request | None:
        if self._seats > 0:
            return waiting.peek(self._now)
        return min(self._preempted.values(), key=lambda request: (request.priority, request.admission), default=None)

    def queued(self, request: Request) -> None:
        if request.state is RequestState.PREEMPTED:
            self._preempted[request.request_id] = request

    def left(self, request: Request) -> None:
        self._preempted.pop(request.request_id, None)

    def joined(self, request: Request) -> None:
        if request.preemptions == 0:
            self._seats -= request.seats

    def full(self) -> None:
        self._seats = 0

    def _batch(self, first: Request | None, waiting: Queue) -> int:
        """Seats of the batch that begins now; `first` is next."""
        return min(self._size, len(waiting))


class Dynamic(Static):
    """A static batch that begins when it is full, or when its first request has waited for `window` seconds."""

    def __init__(self, size: int, window: float) -> None:
        super().__init__(size)
        self._window = window
        self._since: float | None = None

    def open(self, now: float, running: int, waiting: Queue) -> None:
        self.opens_at = None
        super().open(now, running, waiting)

    def _batch(self, first: Request | None, waiting: Queue) -> int:
        if first is None:
            self._since = None
            return 0
        if self._since is None:
            self._since = first.queued
        if len(waiting) < self._size and self._now < self._since + self._window:
            self.opens_at = self._since + self._window
            return 0
        self._since = None
        return super()._batch(first, waiting)


Bucket = tuple[int, bool, int, int]


class Selective(Continuous):
    """Requests that are alike join together: each step admits from one bucket only.

    A bucket holds requests of one priority, phase (new or preempted), length class (powers of two of the tokens still
    to compute) and class of cache hit (none, less than half, more). The fullest bucket is next; but once a request
    has waited for `ageing` seconds, the bucket of whoever is next in the queue, so that none waits longer than its
    order makes it. Lower priorities and preempted requests go first, and those of a bucket join in the queue's order.
    """

    def __init__(self, ageing: float, hit_tokens: Callable[[Request], int]) -> None:
        super().__init__()
        self._ageing = ageing
        self._hit_tokens = hit_tokens
        self._buckets: dict[Bucket, OrderedDict[str, Request]] = {}
        self._bucket_of: dict[str, Bucket] = {}
        self._chosen: Bucket | None = None

    def open(self, now: float, running: int, waiting: Queue) -> None:
        super().open(now, running, waiting)
        self._chosen = self._choose(waiting)

    def candidate(self, waiting: Queue) -> Request | None:
        if self._chosen not in self._buckets:
            return None
        return next(request for request in waiting if self._bucket_of[request.request_id] == self._chosen)

    def queued(self, request: Request) -> None:
        bucket = self.bucket(request)
        self._bucket_of[request.request_id] = bucket
        self._buckets.setdefault(bucket, OrderedDict())[request.request_id] = request

    def left(self, request: Request) -> None:
        bucket = self._bucket_of.pop(request.request_id)
        del self._buckets[bucket][request.request_id]
        if not self._buckets[bucket]:
            del self._buckets[bucket]

    def bucket(self, request: Request) -> Bucket:
        """Where a request belongs, by what the cache holds now."""
        hits = self._hit_tokens(request)
        share = 0 if not hits else 1 if 2 * hits < request.wanted else 2
        new = request.state is not RequestState.PREEMPTED
        return request.priority, new, (request.wanted - hits).bit_length(), share

    def _choose(self, waiting: Queue) -> Bucket | None:
        if not self._buckets:
            return None
        band = min(bucket[:2] for bucket in self._buckets)
        oldest = {
            bucket: next(iter(requests.values())).queued
            for bucket, requests in self._buckets.items()
            if bucket[:2] == band
        }
        head = waiting.peek(self._now)
        if head is not None and self._now - min(oldest.values()) >= self._ageing:
            return self._bucket_of[head.request_id]
        return min(oldest, key=lambda bucket: (-len(self._buckets[bucket]), oldest[bucket]))


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
            return Selective(config.bucket_ageing_s, hit_tokens)
