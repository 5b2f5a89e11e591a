"""Not waiting again for a store that has just failed to answer.

Layer: service. After a failure every call is told at once that the store is away. When a pause has passed, one call
goes through: if it succeeds all do again, if it fails the pause doubles. Nothing runs in the background.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Circuit:
    """`clock` is monotonic, in seconds. Each `allow()` that says True is followed by one of the other calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._until = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Calls are turned away, but for one that tries."""
        return self._pause_s > 0.0

    def allow(self) -> bool:
        """Whether this call may ask the store."""
        if not self.is_open:
            return True
        if self._probing or self._clock() < self._until:
            return False
        self._probing = True
        return True

    def succeeded(self) -> bool:
        """Whether the store is back with this."""
        was_open, self._pause_s, self._probing = self.is_open, 0.0, False
        return was_open

    def failed(self) -> None:
        """Calls that were under way together count as one failure."""
        if not self.is_open or self._probing:
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self._until = self._clock() + self._pause_s
        self._probing = False

    def abandoned(self) -> None:
        """The call was cancelled: nothing is known of the store."""
        self._probing = False
