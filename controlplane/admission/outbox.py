"""Leases that are over and of which the store has not been told yet.

Layer: service. Bounded: beyond `MOST` the oldest is dropped and counted; the store then lets its slots go when the
lease expires, and keeps its reservation charged.
"""

from __future__ import annotations

from collections import deque

import msgspec

from controlplane.admission.answers import Lease
from controlplane.admission.charges import Use

MOST = 20_000


class EndedLease(msgspec.Struct, frozen=True, kw_only=True):
    """What to tell the store. `ended_at` is Unix seconds."""

    lease: Lease
    use: Use
    ended_at: float


class Outbox:
    """First in, first out."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._waiting: deque[EndedLease] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, ended: EndedLease) -> None:
        if len(self._waiting) >= self._most:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(ended)

    def take(self) -> EndedLease:
        return self._waiting.popleft()

    def put_back(self, ended: EndedLease) -> None:
        """It could not be told: it is the next again."""
        if len(self._waiting) >= self._most:
            self.dropped += 1
        else:
            self._waiting.appendleft(ended)
