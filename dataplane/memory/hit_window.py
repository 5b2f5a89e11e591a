"""The prefix cache's hit rate over the latest requests.

Layer: state and memory. Pure. It counts; it decides nothing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Lookups(NamedTuple):
    """Requests looked up together: their tokens, and how many of those were found."""

    requests: int
    tokens: int
    hits: int


class HitWindow:
    """Sums over the latest observations that hold at most `max_requests` requests; always over the latest one."""

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._latest: deque[Lookups] = deque()
        self._requests = self._tokens = self._hits = 0

    @property
    def rate(self) -> float | None:
        """Hits per token looked up, in [0, 1]; None while nothing was."""
        return self._hits / self._tokens if self._tokens else None

    @property
    def requests(self) -> int:
        """How many requests the rate is over."""
        return self._requests

    def observe(self, requests: int, tokens: int, hits: int) -> None:
        """Take in one observation; the oldest go while more than `max_requests` requests are in the window."""
        if not requests:
            return
        self._add(Lookups(requests, tokens, hits), 1)
        self._latest.append(Lookups(requests, tokens, hits))
        while self._requests > self._max_requests and len(self._latest) > 1:
            self._add(self._latest.popleft(), -1)

    def reset(self) -> None:
        """The cache was emptied: what was seen says nothing of it any more."""
        self._latest.clear()
        self._requests = self._tokens = self._hits = 0

    def _add(self, lookups: Lookups, sign: int) -> None:
        self._requests += sign * lookups.requests
        self._tokens += sign * lookups.tokens
        self._hits += sign * lookups.hits
