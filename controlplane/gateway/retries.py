"""How many retries the gateway may spend.

Layer: service. Pure. Retries are at most a tenth of requests over time, with a small float, so that a failing fleet is
never hit harder than a healthy one (F18).
"""

from __future__ import annotations

EARNED_PER_REQUEST = 0.1
MOST_SAVED = 10.0


class RetryBudget:
    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved = MOST_SAVED

    def earn(self) -> None:
        """One request was accepted."""
        self._saved = min(MOST_SAVED, self._saved + EARNED_PER_REQUEST)

    @property
    def left(self) -> bool:
        """Whether there is one to spend."""
        return self._saved >= 1.0

    def spend(self) -> bool:
        """Take one retry; False when there is none left."""
        if not self.left:
            return False
        self._saved -= 1.0
        return True
