"""Signals that ask for a stop, as KeyboardInterrupt in those stretches of code alone that expect it.

Layer: service. Elsewhere one is kept until the next such stretch begins, so that none cuts a stop short between two of
its steps. It decides nothing: `cli` and `supervisor` do. Use from the main thread only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TOGETHER_S = 1.0
"""What follows the first signal within this time is the same request: a process group and a parent in it are often told
together, and the parent tells its child again."""


class Interrupts:
    """Hears SIGINT and SIGTERM, and SIGHUP unless it is ignored (nohup asks to outlive the terminal), from its making
    on; also when a shell that started us in the background ignores SIGINT.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None
        self._raises = False
        self._kept = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._heard)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within it one request raises KeyboardInterrupt, at once if it came before."""
        self._raises = True
        try:
            if self._kept:
                self._interrupt()
            yield
        finally:
            self._raises = False

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self._first is None:
            self._first = now
        elif now - self._first < TOGETHER_S:
            return
        self._kept = True
        if self._raises:
            self._interrupt()

    def _interrupt(self) -> None:
        self._kept = self._raises = False
        raise KeyboardInterrupt
