"""Reading and answering one HTTP request at the ASGI level.

Layer: service. The streaming routes speak raw ASGI, because the gateway must see a client leave at the very moment it
does. Request bodies are bounded in size and time before anything is kept of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, HTTPScope, Receive, Send

from controlplane.admission.patience import Patience, slices_of
from controlplane.alarms import Alarms
from controlplane.errors import AuthenticationError, PayloadTooLargeError, TidegateError
from controlplane.gateway.errors import (
    ClientGoneError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
    error_body,
)
from controlplane.gateway.wishes import HEADERS as WISHES
from dataplane.protocol import HEADER_REQUEST

BODY_TIMEOUT_S = 60.0
"""Longest wait for a request body to arrive whole."""

SMALL_BODY = 16 * 1024
DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 5.0
"""A refused client may go on sending this much and this long before the connection is closed under it."""

FORGED_PREFIX = b"x-tidegate-"
"""Of the headers that gateways and replicas believe. What proxies say of a user (x-forwarded-user, x-remote-user and
their like) nothing here reads, so it needs no counting."""

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", b"application/json")


class RequestHead:
    """The headers the gateway looks at. All others end here: nothing of them reaches a replica (F23)."""

    __slots__ = ("authorization", "body_read", "chunked", "content_length", "encoding", "forged", "wishes")

    def __init__(self, scope: HTTPScope) -> None:
        self.authorization: str | None = None
        self.content_length = 0
        self.chunked = False
        self.body_read = False
        """Whether the whole body has been read."""
        self.encoding = b""
        self.forged = 0
        """Headers that pretended to come from inside."""
        self.wishes: dict[bytes, bytes] = {}
        """What the client asks of its place in line."""
        seen_authorization = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                # two identities are none
                self.authorization = "" if seen_authorization else value.decode("latin-1")
                seen_authorization = True
            elif name == b"content-length":
                self.content_length = int(value) if value.isdigit() else 0
            elif name == b"transfer-encoding":
                self.chunked = True
            elif name == b"content-encoding":
                self.encoding = value.lower()
            elif name.startswith(FORGED_PREFIX):
                self.forged += 1
            elif name in WISHES:
                self.wishes[name] = value


def body_slices() -> Alarms:
    """What all who read bodies in one event loop share."""
    return slices_of(BODY_TIMEOUT_S)


async def read_body(head: RequestHead, receive: Receive, limit: int, slices: Alarms) -> tuple[bytes, float]:
    """The whole body and the seconds spent waiting for the client to send it; `slices` are `body_slices`.

    Raises PayloadTooLargeError before more than `limit` bytes are kept, RequestTimeoutError, ClientGoneError, and
    UnsupportedMediaTypeError for a compressed body.
    """
    if head.encoding not in {b"", b"identity"}:
        raise UnsupportedMediaTypeError("Send the request body without content-encoding.")
    if head.content_length > limit:
        raise _too_large(limit)
    started = time.monotonic()
    parts: list[bytes] = []
    size = 0
    try:
        async with Patience(slices):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                if part:
                    parts.append(part)
                if not message.get("more_body", False) or size == head.content_length > 0:
                    head.body_read = True
                    break
    except TimeoutError:
        raise RequestTimeoutError(f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} seconds.") from None
    return parts[0] if len(parts) == 1 else b"".join(parts), time.monotonic() - started


async def discard_body(head: RequestHead, receive: Receive) -> None:
    """Drop what a refused client is still sending, within bounds: a connection that is closed in the middle of a large
    body costs the client the very answer that says why."""
    if head.body_read or not (head.chunked or head.content_length > SMALL_BODY):
        return
    dropped = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while dropped < DISCARD_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                dropped += len(message.get("body", b""))


async def client_left(receive: Receive) -> None:
    """Return when the client closes the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_head(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
    start: HTTPResponseStartEvent = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)


async def send_part(send: Send, body: bytes, *, more: bool) -> None:
    part: HTTPResponseBodyEvent = {"type": "http.response.body", "body": body, "more_body": more}
    await send(part)


async def respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """A whole response at once."""
    await send_head(send, status, [*headers, (b"content-length", str(len(body)).encode())])
    await send_part(send, body, more=False)


async def respond_error(send: Send, error: TidegateError, request_id: str) -> None:
    """`error` as OpenAI clients expect it."""
    headers: Headers = [JSON_TYPE, (HEADER_REQUEST.encode(), request_id.encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    await respond(send, error.status, error_body(error), headers)


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {limit} bytes.")
