"""A client that leaves while it is served.

Layer: service. ASGI tells of it only to who asks. Most answers of a fast replica are sent before it is worth asking, so
the asking begins a moment late; a client that was gone by then is noticed then. It must never let a cancellation of its
own look like one of the server's.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from litestar.types import Receive

from controlplane.alarms import Alarms
from controlplane.gateway.asgi import client_left
from controlplane.gateway.errors import ClientGoneError

ASK_AFTER_S = 0.01


class Departure:
    """`async with Departure(receive, alarms)`: the moment the client leaves, what the body waits for is cancelled, and
    ClientGoneError raised. The request's body must have been read; `alarms` ring after `ASK_AFTER_S`.
    """

    __slots__ = ("_alarm", "_alarms", "_gone", "_over", "_receive", "_task", "_watch")

    def __init__(self, receive: Receive, alarms: Alarms) -> None:
        self._receive = receive
        self._alarms = alarms
        self._watch: asyncio.Task[None] | None = None
        self._gone = False
        self._over = False
        """The body has ended: what is heard now concerns nobody."""

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be told that its client left"
        self._task = task
        self._alarm = self._alarms.set(self._ask)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._alarms.drop(self._alarm)
        if self._watch is not None:
            self._watch.remove_done_callback(self._left)
            self._watch.cancel()
        if self._gone:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise ClientGoneError from error

    def _ask(self) -> None:
        self._watch = asyncio.create_task(client_left(self._receive))
        self._watch.add_done_callback(self._left)

    def _left(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            watch.exception()  # a connection that cannot be asked is gone too
            if not self._over:
                self._gone = True
                self._task.cancel()
