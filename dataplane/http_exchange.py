"""One HTTP request and its answer over raw ASGI.

Layer: service. Owns the bounded body, the notice that the client has left, and that every answer is ended
once. Nothing else cleans up a stream whose reader left, so this watches `receive` itself. It knows
nothing of models or tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cached_property
from typing import Any

from dataplane.api_error import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
"""ASGI 3.0: a connection's scope, its incoming events and its outgoing ones."""


DISCARDED_BYTES = 32 * 1024 * 1024
"""How much of a body beyond its limit is read and forgotten before the answer is sent regardless."""


class ClientGoneError(Exception):
    """The client left, or took nothing for too long."""


class Exchange:
    """Reads one request, writes one answer. `gone` is true once the client has left."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, timeout_s: float) -> None:
        """`timeout_s` bounds how long the client may take to send its body, and to take each piece of the answer."""
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s
        self._scope = scope
        self._watcher: asyncio.Task[None] | None = None
        self._ended = False
        self.started = False
        self.gone = False

    @property
    def method(self) -> str:
        return str(self._scope.get("method", ""))

    @property
    def path(self) -> str:
        return str(self._scope.get("path", ""))

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")

    @cached_property
    def headers(self) -> dict[str, str]:
        """Header names in lower case; of a repeated header the last."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._scope["headers"]}

    async def body(self, limit: int) -> bytes:
        """The whole body, at most `limit` bytes of it in memory. Raises ApiError 413 for a larger one.

        The rest of a body that is too large is read and forgotten, within bounds: a client that is cut off while
        it sends never reads the answer.
        """
        chunks = bytearray()
        seen, more = 0, True
        try:
            async with asyncio.timeout(self._timeout_s):
                while more and seen <= limit + DISCARDED_BYTES:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        self.gone = True
                        raise ClientGoneError
                    piece = message.get("body", b"")
                    seen += len(piece)
                    if seen <= limit:
                        chunks += piece
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, "the request body did not come in time", code="request_timeout") from None
        if seen > limit:
            raise ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")
        return bytes(chunks)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` the moment the client leaves. Only after the body was read."""
        self._watcher = asyncio.create_task(self._wait(on_gone), name="client-watch")

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.started = True
        await self._write(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            }
        )

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece of the body. Raises ClientGoneError when nobody takes it."""
        self._ended = last
        await self._write({"type": "http.response.body", "body": data, "more_body": not last})

    async def answer(self, status: int, headers: Iterable[tuple[str, str]], data: bytes) -> None:
        """A whole answer at once."""
        await self.start(status, [*headers, ("content-length", str(len(data)))])
        await self.write(data, last=True)

    async def close(self) -> None:
        """End a started answer and stop watching; must be called, may be called again."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        if self.started and not self._ended and not self.gone:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        on_gone()

    async def _write(self, message: MutableMapping[str, Any]) -> None:
        if self.gone:
            raise ClientGoneError
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            self.gone = True
            raise ClientGoneError from None
