"""The waiting queue.

Layer: scheduling. Pure. Order: priority (lower first), then requests that were preempted, then the fair tag a
gateway supplied (lower first), then arrival: equal priorities and tags are first come, first served. It
orders; it does not admit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from dataplane.request import Request

Key = tuple[int, bool, float, float, int]


class WaitingQueue:
    """A heap with lazy removal: push and pop O(log n), remove O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Request]] = []
        self._live: dict[str, Key] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        """In order of service."""
        return (request for key, request in sorted(self._heap) if self._live.get(request.request_id) == key)

    def push(self, request: Request) -> None:
        """Queue a new request."""
        self._insert((request.priority, True, request.fair_tag, request.queued, next(self._arrivals)), request)

    def push_front(self, request: Request) -> None:
        """Queue a preempted request before all new ones of its priority, the earlier admission first."""
        self._insert((request.priority, False, 0.0, 0.0, request.admission), request)

    def peek(self) -> Request | None:
        """Who is next."""
        while self._heap:
            key, request = self._heap[0]
            if self._live.get(request.request_id) == key:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take out who is next. The queue must not be empty."""
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take out one request, wherever it stands."""
        del self._live[request.request_id]
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [(key, kept) for key, kept in self._heap if self._live.get(kept.request_id) == key]
            heapq.heapify(self._heap)

    def _insert(self, key: Key, request: Request) -> None:
        assert request.request_id not in self._live
        self._live[request.request_id] = key
        heapq.heappush(self._heap, (key, request))
