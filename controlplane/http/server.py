"""Serving one application in the running event loop until told to stop.

Layer: service. Connections and the application share one thread: nothing is handed over between two, which costs a
relay more than reading HTTP does (docs/adr/0021). It decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from controlplane.alarms import Alarms
from controlplane.http.bounds import BACKLOG, HEAD_S, IDLE_S, STALLED_S, STOP_S
from controlplane.http.connection import Connection

logger = logging.getLogger("tidegate.http")

DATE_S = 1.0


class StartError(Exception):
    """The application could not start; the log says why."""


class Connections(ServerState):
    """What the connections of one server share. At most `most` are served at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.is_stopping = False
        self.head_alarms = Alarms(HEAD_S)
        self.idle_alarms = Alarms(IDLE_S)
        self.stall_alarms = Alarms(STALLED_S)
        self.empty = asyncio.Event()

    def left(self) -> None:
        """A connection is gone."""
        if not self.connections:
            self.empty.set()


class HttpServer:
    """`application` (ASGI 3, with lifespan) on the bound socket `listening`, which this closes.

    `most_connections` are served at once; further ones are told 503. The socket's protocol must be IPPROTO_TCP, or
    asyncio's own loop holds back an answer's body for 40 ms (Nagle).
    """

    def __init__(self, application: Any, listening: socket.socket, *, most_connections: int = 4096) -> None:
        self._config = Config(
            application,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            interface="asgi3",
        )
        self._listening = listening
        self._most = most_connections
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Take no more connections and end once the requests under way have their answers, or soon after."""
        self._stop.set()

    async def serve(self, signals: Sequence[signal.Signals] = ()) -> None:
        """Serve until `stop` or one of `signals`. Raises StartError, OSError when the socket cannot listen."""
        self._config.load()
        state = Connections(self._most)
        lifespan = LifespanOn(self._config)
        with self._hearing(signals):
            await lifespan.startup()
            if lifespan.should_exit:
                self._listening.close()
                raise StartError("the application could not start")
            loop = asyncio.get_running_loop()
            listener = await loop.create_server(
                lambda: Connection(self._config, state, lifespan.state), sock=self._listening, backlog=BACKLOG
            )
            logger.info("Serving on %s:%d", *listener.sockets[0].getsockname()[:2])
            try:
                await self._serving(state)
            finally:
                logger.info("Stopping: %d connections are open", len(state.connections))
                listener.close()
                await _leave(state)
                await lifespan.shutdown()

    async def _serving(self, state: Connections) -> None:
        """Wait for the stop, and tell the date meanwhile, as an origin server with a clock must."""
        while not self._stop.is_set():
            state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._stop.wait()

    @contextlib.contextmanager
    def _hearing(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def heard(*_: object) -> None:
            loop.call_soon_threadsafe(self.stop)

        before = {number: signal.signal(number, heard) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _leave(state: Connections) -> None:
    """Let what is under way end, then cut it."""
    state.is_stopping = True
    for connection in tuple(state.connections):
        connection.shutdown()
    if state.connections:
        state.empty.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await state.empty.wait()
    for connection in tuple(state.connections):
        connection.transport.abort()
    tasks = tuple(state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
