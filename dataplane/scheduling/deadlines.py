"""Requests whose first token is worth nothing after some moment.

Layer: scheduling. Pure. It tells whose moment has come; whether that ends the request is the scheduler's affair.
"""

from __future__ import annotations

from dataplane.request import Request
from dataplane.scheduling.heap import LazyHeap


class Deadlines:
    """Requests by deadline."""

    def __init__(self) -> None:
        self._requests: LazyHeap[Request] = LazyHeap()

    def watch(self, request: Request) -> None:
        """Tell of `request` once its deadline has passed; nothing to do for one that has none."""
        if request.deadline is not None:
            self._requests.put(request.request_id, (request.deadline,), request)

    def forget(self, request: Request) -> None:
        """The request ended."""
        if request.request_id in self._requests:
            self._requests.remove(request.request_id)

    def due(self, now: float) -> list[Request]:
        """Those whose deadline has passed by `now` (seconds), each told of once."""
        passed = []
        while (first := self._requests.first()) is not None and first.deadline is not None and first.deadline <= now:
            passed.append(self._requests.remove(first.request_id))
        return passed

    @property
    def next_at(self) -> float | None:
        """The earliest deadline that was not told of."""
        first = self._requests.first()
        return None if first is None else first.deadline
