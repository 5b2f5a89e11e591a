"""The log-probabilities of one sequence's tokens, kept until the text they made is given out.

Layer: service. Pure. Text may be held back, because it could begin a stop string or lacks the rest of a character,
and text from a stop string on is never given out; a token's log-probability goes the way of its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dataplane.protocol import TokenLogprob

Placed = tuple[TokenLogprob, int]
"""A token and where its text begins, in characters of the whole text."""


class LogprobTrail:
    """`total` is the log-probability of all that was generated, given out or not."""

    def __init__(self) -> None:
        self.total = 0.0
        self._waiting: deque[Placed] = deque()
        self._ready: list[Placed] = []

    def add(self, entry: TokenLogprob, at: int) -> None:
        """A token whose text begins at character `at`."""
        self._waiting.append((entry, at))

    def count(self, entries: Sequence[TokenLogprob]) -> None:
        """Add to the total."""
        self.total += sum(entry.logprob for entry in entries)

    def release(self, end: int | None) -> None:
        """Text up to character `end` is given out; None: everything there is."""
        while self._waiting and (end is None or self._waiting[0][1] < end):
            self._ready.append(self._waiting.popleft())

    def read(self) -> list[Placed]:
        """Take what has been released since the last call."""
        ready, self._ready = self._ready, []
        return ready
