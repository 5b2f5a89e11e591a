"""When a request that was refused for lack of room should come back, and the place that is kept for it then.

Layer: service. Pure: times are handed in (seconds on one clock), randomness too. The wait is an estimate from what the
holder of the room knows: how fast requests end, and whom it has already sent away. Those sent away get places one
after another, at a share of the rate at which requests end, so that they do not come back together; and shortly before
one is due a free place is no longer given to others. A place is kept for a key and the size of the request that was
refused: it comes back unchanged, while new ones of the same key, of which a large room sees several in the time a
refusal travels, seldom are as large. It never admits beyond the room's limit.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

LONGEST_S = 60
"""No wait is longer. Where all of it is given away, who is refused comes at a random time of its second half."""
MEMORY_S = 10.0
"""Requests that ended this long ago count 1/e in the rate."""
COMING_BACK = 0.5
"""Share of the requests that end whose places are given to such as come back."""
NEAR_S = 0.25
"""Appointments are counted so far to both sides of a time, or as far as two would be apart."""
KEPT = 4
"""At most one place in so many is kept empty for those who are due."""
EARLY_ENDS = 4.0
"""A place is kept from so many expected ends before it is due, so that one has become free by then."""
EARLIEST_S, LATEST_S = 4.0, 0.4
"""Bounds of that, before the time."""
GRACE_S = 1.0
"""A place is kept this long after it was due."""


class Asker(NamedTuple):
    """Whose request asks, and which of theirs: the identity of its API key and the bytes of its body, 0 if unknown."""

    key: str
    size: int = 0


def wait_s(now: float, ends_per_s: float | None, booked: Sequence[float], *, waiting: int = 0) -> int | None:
    """Whole seconds from `now` until there should be room: when `waiting` requests in line and this one have been
    served, at the first time near which there are not too many of the appointments `booked`, in order. None when there
    is no such time.
    """
    ends = ends_per_s or 1.0
    first = max(1, math.ceil((waiting + 1) / ends))
    gap = 1.0 / (ends * COMING_BACK)
    near = max(NEAR_S, gap)
    for seconds in range(first, LONGEST_S + 1):
        at = now + seconds
        if bisect.bisect(booked, at + near) - bisect.bisect(booked, at - near) < 2 * near / gap:
            return seconds
    return None


class Comebacks:
    """One room of `limit` places: who may enter, and when who may not should come back.

    Call `admits` for each arrival, then `refuse` if it says no, and `ended` when one that entered has left.
    """

    def __init__(self, limit: int, rng: Random) -> None:
        self._limit = limit
        self._rng = rng
        self._ended = 0.0
        self._first_at: float | None = None
        self._counted_at = 0.0
        self._booked: list[float] = []
        self._count = 0
        self._coming: list[tuple[float, int, float, Asker]] = []
        self._closing: list[tuple[float, float, int]] = []
        self._due: dict[int, Asker] = {}
        self._due_of: dict[Asker, list[tuple[float, int]]] = {}
        self._booked_by: dict[str, int] = {}

    @property
    def kept(self) -> int:
        """Places kept for those who are due; as of the last call."""
        return min(len(self._due), self._limit // KEPT)

    def admits(self, asker: Asker, in_flight: int, now: float) -> bool:
        """Whether the request of `asker` may enter a room that holds `in_flight`."""
        if in_flight >= self._limit:
            return False
        if not self._booked_by:
            return True
        self._turn_to(now)
        due = self._due_of.get(asker)
        if due and due[0][0] <= now:
            self._leave_book(due.pop(0)[1])
            return True
        return in_flight + self.kept < self._limit

    def ended(self, now: float) -> None:
        """A request has left the room."""
        if self._first_at is None:
            self._first_at = self._counted_at = now
        self._age(now)
        self._ended += 1.0

    def refuse(self, asker: Asker, now: float, *, waiting: int = 0) -> int:
        """Whole seconds after which the request of `asker` refused now should come back, 1 to `LONGEST_S`."""
        self._turn_to(now)
        rate = self._rate(now)
        seconds = wait_s(now, rate, self._booked, waiting=waiting)
        if seconds is None or self._booked_by.get(asker.key, 0) >= self._limit:
            return math.ceil(LONGEST_S * (1.0 + self._rng.random()) / 2)
        early = min(EARLIEST_S, EARLY_ENDS / rate) if rate else EARLIEST_S
        self._book(asker, now + seconds, max(LATEST_S, early))
        return seconds

    def _book(self, asker: Asker, due: float, early: float) -> None:
        self._count += 1
        self._booked_by[asker.key] = self._booked_by.get(asker.key, 0) + 1
        bisect.insort(self._booked, due)
        heapq.heappush(self._coming, (due - early, self._count, due, asker))

    def _turn_to(self, now: float) -> None:
        """Keep the places of those who are due, and no longer those of who did not come."""
        while self._coming and self._coming[0][0] <= now:
            _, number, due, asker = heapq.heappop(self._coming)
            self._due[number] = asker
            bisect.insort(self._due_of.setdefault(asker, []), (due, number))
            heapq.heappush(self._closing, (due + GRACE_S, due, number))
        del self._booked[: bisect.bisect(self._booked, now - NEAR_S)]
        while self._closing and self._closing[0][0] <= now:
            _, due, number = heapq.heappop(self._closing)
            if number in self._due:
                self._due_of[self._due[number]].remove((due, number))
                self._leave_book(number)

    def _leave_book(self, number: int) -> None:
        asker = self._due.pop(number)
        if not self._due_of[asker]:
            del self._due_of[asker]
        self._booked_by[asker.key] -= 1
        if not self._booked_by[asker.key]:
            del self._booked_by[asker.key]

    def _rate(self, now: float) -> float | None:
        """Requests that end a second, of late."""
        if self._first_at is None:
            return None
        self._age(now)
        return self._ended / (MEMORY_S * -math.expm1(-max(now - self._first_at, 1.0) / MEMORY_S))

    def _age(self, now: float) -> None:
        if now > self._counted_at:
            self._ended *= math.exp((self._counted_at - now) / MEMORY_S)
            self._counted_at = now
