"""Many wake-ups that all come equally long after they were set.

Layer: service. Each request sets several and drops nearly all of them before they ring; they share one timer of the
event loop, for a timer costs more than what it guards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("tidegate.controlplane")


class Alarms:
    """Belongs to the event loop that first sets one. An alarm rings once, `after_s` seconds after it was set."""

    __slots__ = ("_after_s", "_is_awake", "_loop", "_number", "_set")

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._set: dict[int, tuple[float, Callable[[], None]]] = {}
        """By number, and so by when they are due."""
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_awake = False
        """The loop's timer is set, or what is due rings now."""

    def __len__(self) -> int:
        return len(self._set)

    def set(self, ring: Callable[[], None]) -> int:
        """Call `ring` later, unless the number that is returned is dropped before."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._number = number = self._number + 1
        self._set[number] = (self._loop.time() + self._after_s, ring)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_later(self._after_s, self._ring)
        return number

    def drop(self, number: int) -> None:
        """Forget an alarm; harmless when it has rung."""
        self._set.pop(number, None)

    def _ring(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        while self._set:
            number, (due, ring) = next(iter(self._set.items()))
            if due > now:
                self._loop.call_at(due, self._ring)
                return
            del self._set[number]
            try:
                ring()
            except Exception:
                logger.exception("An alarm failed")
        self._is_awake = False
