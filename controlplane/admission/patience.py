"""How long a caller waits for an answer, not counting the time in which it was not listening itself.

Layer: service. A process that is busy with other work finds its timer expired and the answer in the same moment, and a
plain timeout would take its own lateness for the other's silence. So time passes here in slices, and each slice gives
the event loop a turn to hear the answer.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from controlplane.alarms import Alarms

SLICES = 10


def slices_of(seconds: float) -> Alarms:
    """The alarms of all who wait for `seconds`, in one event loop."""
    return Alarms(seconds / SLICES)


class Patience:
    """`async with Patience(slices)`: raises TimeoutError in the body when no slice is left. `slices` are the alarms
    that all who wait equally long share, see `slices_of`.
    """

    __slots__ = ("_alarm", "_alarms", "_before", "_expired", "_left", "_task")

    def __init__(self, slices: Alarms) -> None:
        self._alarms = slices
        self._left = SLICES
        self._expired = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be told to stop waiting"
        self._task, self._before = task, task.cancelling()
        self._alarm = self._alarms.set(self._passed)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarms.drop(self._alarm)
        if self._expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _passed(self) -> None:
        self._left -= 1
        if self._left:
            self._alarm = self._alarms.set(self._passed)
        else:
            self._expired = True
            self._task.cancel()
