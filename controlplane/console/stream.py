"""One browser's event stream.

Layer: service. A plain ASGI application that owns its cleanup: it watches `receive()` for the disconnect itself, asks
from time to time whether the session still lives, and leaves no task or slot behind whichever way it ends (F37).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from litestar.types import Receive, Scope, Send

from controlplane.console.live import Broadcaster, Watcher, encode_event
from controlplane.outage import away

SESSION_CHECK_S = 10.0
SEND_TIMEOUT_S = 20.0
"""A browser that takes nothing for this long is given up."""
RETRY = b"retry: 2000\n\n"
ENDED = encode_event("ended", "the session has ended")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Streams one window's snapshots until the browser leaves, the session ends or the process stops."""

    def __init__(
        self,
        broadcaster: Broadcaster,
        window_s: int,
        still_allowed: Callable[[], Awaitable[bool]],
        *,
        session_check_s: float = SESSION_CHECK_S,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self._broadcaster = broadcaster
        self._window_s = window_s
        self._still_allowed = still_allowed
        self._session_check_s = session_check_s
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._broadcaster.watch(self._window_s) as watcher:
            gone = asyncio.create_task(_until_gone(receive, watcher))
            try:
                # A browser that is gone or takes nothing is not an error: there is nobody left to tell.
                with suppress(TimeoutError, OSError):
                    await self._stream(watcher, send)
            finally:
                gone.cancel()
                await asyncio.wait({gone})

    async def _stream(self, watcher: Watcher, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._body(send, RETRY)
        check_at = time.monotonic() + self._session_check_s
        while (payload := await watcher.next()) is not None:
            if time.monotonic() >= check_at:
                if not await self._allowed():
                    await self._body(send, ENDED)
                    break
                check_at = time.monotonic() + self._session_check_s
            if payload:
                await self._body(send, payload)
        await self._body(send, b"", more=False)

    async def _allowed(self) -> bool:
        """An outage of the store that knows sessions ends no stream; the next check asks again."""
        try:
            return await self._still_allowed()
        except Exception as error:
            if away(error) is None:
                raise
            return True

    async def _body(self, send: Send, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def _until_gone(receive: Receive, watcher: Watcher) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    watcher.close()
