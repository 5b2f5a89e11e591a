"""How long a caller waits for an answer, not counting the time in which it was not listening itself.

Layer: service. A process that is busy with other work finds its timer expired and the answer in the same moment, and a
plain timeout would take its own lateness for the other's silence. So time passes here in slices, and each slice gives
the event loop a turn to hear the answer.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

SLICES = 10


class Patience:
    """`async with Patience(seconds)`: raises TimeoutError in the body when no slice of `seconds` is left."""

    __slots__ = ("_before", "_expired", "_left", "_loop", "_slice_s", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._slice_s = seconds / SLICES
        self._left = SLICES
        self._expired = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be told to stop waiting"
        self._task, self._before = task, task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._slice_s, self._passed)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _passed(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(self._slice_s, self._passed)
        else:
            self._expired = True
            self._task.cancel()
