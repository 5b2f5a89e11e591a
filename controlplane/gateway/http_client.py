"""HTTP/1.1 to replicas: one request at a time on each of a pool's connections.

Layer: service. Thin on purpose: a token costs one read, one parse and one wake-up. Bodies are given on as they come
and held in bounds: who does not read stops the replica's writing. It must never follow a redirect, repeat a request, or
keep a connection whose last answer it does not know to be over.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import httptools

from controlplane.egress import Target, TargetRefusedError, parse_target
from controlplane.gateway.guarded import AddressRefusedError, GuardedAddresses

CONNECT_S = 5.0
KEEPALIVE_S = 15.0
"""An idle connection is not used again after so long."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a head, of trailers and of whatever else comes between two pieces of a body."""
MAX_INTERIM = 8
"""Answers of status 1xx before the one that counts."""
HELD_BYTES = 256 * 1024
"""A body's bytes that may wait to be read."""
MAX_URLS = 4096


class HttpError(Exception):
    """Why there is no whole answer."""


class UnreachableError(HttpError):
    """No connection, so nothing was sent."""


class RefusedError(HttpError):
    """The URL leads where nobody connects to."""


class LostError(HttpError):
    """The connection ended in the middle."""


class SilentError(HttpError):
    """The replica sent nothing for too long."""


class ProtocolError(HttpError):
    """What came is not HTTP, or more than is taken."""


class Address(NamedTuple):
    """Where a URL's connections go: those of equal addresses are shared."""

    target: Target
    """Without a path."""
    tls: bool


class HttpPool:
    """Connections by address. `silence_s`: longest wait for the next byte of an answer; `addresses` says where to
    connect to. Open inside the loop.
    """

    def __init__(self, silence_s: float, addresses: GuardedAddresses) -> None:
        self.silence_s = silence_s
        self._addresses = addresses
        self.in_use = 0
        """Requests sent whose response was not closed."""
        self.loop = asyncio.get_running_loop()
        self._idle: dict[Address, deque[Connection]] = {}
        self._urls: dict[str, tuple[Address, bytes]] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, on_sent: Callable[[], None] = lambda: None
    ) -> Response:
        """Send a request and wait for the answer's head. Raises HttpError. The caller closes the response. `on_sent` is
        called when the request goes out: before that nobody can have seen it.
        """
        address, line = self._target(url)
        head = line + _lines(headers) + b"content-length: %d\r\n\r\n" % len(body)
        self.in_use += 1
        try:
            connection = self._take(address) or await self._connect(address)
            response = Response(self, connection)
            try:
                connection.begin(response, head, body)
                on_sent()
                await response.head()
            except BaseException:
                connection.abort()
                raise
        except BaseException:
            self.in_use -= 1
            raise
        return response

    def close(self) -> None:
        """Close what is idle; what is in use closes with its response."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    def give_back(self, connection: Connection) -> None:
        """The response that used `connection` is closed."""
        self.in_use -= 1
        if self._closed or not connection.is_reusable:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        self._idle.setdefault(connection.address, deque()).append(connection)
        if self._sweep is None:
            self._sweep = self.loop.call_later(KEEPALIVE_S, self._close_old)

    def _take(self, address: Address) -> Connection | None:
        """The connection that was used last, if it is still good."""
        idle = self._idle.get(address)
        oldest = self.loop.time() - KEEPALIVE_S
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _close_old(self) -> None:
        self._sweep = None
        oldest = self.loop.time() - KEEPALIVE_S
        for address, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since <= oldest or not idle[0].is_reusable):
                idle.popleft().abort()
            if not idle:
                del self._idle[address]
        if self._idle:
            self._sweep = self.loop.call_later(KEEPALIVE_S / 2, self._close_old)

    async def _connect(self, address: Address) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._first(address, await self._addresses.of(address.target))
        except AddressRefusedError as error:
            raise RefusedError(str(error)) from error
        except (OSError, TimeoutError) as error:
            raise UnreachableError(f"cannot connect: {error}") from error

    async def _first(self, address: Address, hosts: Sequence[str]) -> Connection:
        """A connection to the first of `hosts` that takes one. Raises OSError."""
        tls, name = self._context(address), address.target.host
        for number, host in enumerate(hosts, 1):
            try:
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self, address),
                    host,
                    address.target.port,
                    ssl=tls,
                    server_hostname=name if tls else None,
                )
            except OSError:
                if number == len(hosts):
                    raise
            else:
                return connection
        raise OSError("there is no address")

    def _context(self, address: Address) -> ssl.SSLContext | None:
        if not address.tls:
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _target(self, url: str) -> tuple[Address, bytes]:
        """The address of `url`, and a request's first lines. Raises RefusedError."""
        known = self._urls.get(url)
        if known is None:
            if len(self._urls) >= MAX_URLS:
                self._urls.clear()
            try:
                target = parse_target(url)
            except TargetRefusedError as error:
                raise RefusedError(str(error)) from None
            host = f"[{target.host}]" if ":" in target.host else target.host
            line = f"POST {target.path or '/'} HTTP/1.1\r\nhost: {host}:{target.port}\r\n"
            address = Address(replace(target, path=""), target.scheme == "https")
            known = self._urls[url] = (address, line.encode())
        return known


class Response:
    """An answer whose head has arrived; `close` it however it ends. Header names are in lower case; of several equal
    ones the first counts.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_held",
        "_is_closed",
        "_is_over",
        "_parts",
        "_pool",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(self, pool: HttpPool, connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self._parts: list[bytes] = []
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: HttpError | None = None
        self._is_over = False
        self._is_closed = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}

    @property
    def content_type(self) -> bytes:
        """Without its parameters."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    async def head(self) -> None:
        """Wait for status and headers. Raises HttpError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            self._waiter = self._pool.loop.create_future()
            await self._waiter

    async def read(self) -> bytes:
        """What has come of the body since the last call, at least a byte; empty at its end. Raises HttpError, after
        everything that came before the error was read.
        """
        while not self._parts:
            if self._is_over:
                return b""
            if self._error is not None:
                raise self._error
            self._waiter = self._pool.loop.create_future()
            await self._waiter
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._held > HELD_BYTES:
            self._connection.resume()
        self._held = 0
        return data

    def close(self) -> None:
        """Give the connection back, or end it in the middle."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.end()
            self._pool.give_back(self._connection)

    # What the connection tells ---------------------------------------------------------------------------------------

    def begun(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def came(self, data: bytes) -> None:
        self._parts.append(data)
        self._held += len(data)
        if self._held > HELD_BYTES:
            self._connection.pause()
        self._wake()

    def over(self) -> None:
        self._is_over = True
        self._wake()

    def failed(self, error: HttpError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, and the parser of its present answer."""

    def __init__(self, pool: HttpPool, address: Address) -> None:
        self.address = address
        self.idle_since = 0.0
        self._pool = pool
        self._loop = pool.loop
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        """Since the request, or the last piece of the body."""
        self._interim = 0
        self._status = 0
        self._until_close = False
        """The body ends with the connection."""
        self._complete = True
        self._spoiled = False
        """It is of no use after this answer."""
        self._paused = False
        self._heard = 0.0
        self._watch: asyncio.TimerHandle | None = None

    @property
    def is_reusable(self) -> bool:
        transport = self._transport
        return (
            self._complete
            and not self._spoiled
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def begin(self, response: Response, head: bytes, body: bytes) -> None:
        """Send a request whose answer goes to `response`. Raises LostError when the connection has just ended."""
        if self._transport is None:
            raise LostError("the connection was closed")
        self._response = response
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = self._interim = self._status = 0
        self._complete = self._until_close = False
        self._heard = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._pool.silence_s, self._look)
        self._transport.writelines((head, body))

    def end(self) -> None:
        """Nobody reads the answer any more."""
        self._response = self._parser = None
        if self._paused:
            self.resume()

    def abort(self) -> None:
        self._spoiled = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        self._heard = self._loop.time()
        if self._paused and self._transport is not None:
            self._transport.resume_reading()
        self._paused = False

    # asyncio.Protocol -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._spoiled = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._complete:
            return
        if self._until_close and error is None:
            self._finish()
        else:
            self._fail(LostError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None or self._complete:
            self.abort()  # nothing was asked
            return
        self._heard = self._loop.time()
        self._head_bytes += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._fail(ProtocolError(str(error)))
            self.abort()
            return
        if self._head_bytes > MAX_HEAD_BYTES and not self._complete:
            self._fail(ProtocolError("too much that is no body"))
            self.abort()

    # httptools ------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._spoiled = True  # more than one answer to one request
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # else a trailer
            self._headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        if self._complete or self._parser is None or self._response is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._status, headers = status, self._headers
        framed = b"content-length" in headers or b"transfer-encoding" in headers
        self._until_close = not framed and status not in {204, 304}
        self._response.begun(status, headers)

    def on_body(self, data: bytes) -> None:
        self._head_bytes = 0
        if not self._complete and self._response is not None:
            self._response.came(data)

    def on_message_complete(self) -> None:
        if self._complete or self._parser is None:
            return
        if self._status:
            self._spoiled = self._spoiled or not self._parser.should_keep_alive()
            self._finish()
            return
        self._interim += 1
        if self._interim > MAX_INTERIM:
            self._fail(ProtocolError("too many interim answers"))
            self.abort()

    def _finish(self) -> None:
        self._complete = True
        if self._response is not None:
            self._response.over()

    def _fail(self, error: HttpError) -> None:
        self._complete = self._spoiled = True
        if self._response is not None:
            self._response.failed(error)

    def _look(self) -> None:
        """Whether the replica has been silent for too long; a reader that does not read is not its fault."""
        self._watch = None
        if self._complete:
            return
        silent = 0.0 if self._paused else self._loop.time() - self._heard
        if silent >= self._pool.silence_s:
            self._fail(SilentError("nothing came in time"))
            self.abort()
        else:
            self._watch = self._loop.call_later(self._pool.silence_s - silent, self._look)


def _lines(headers: Mapping[str, str]) -> bytes:
    """The headers' lines. Raises ValueError for one that would begin another line."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        raise ValueError("a header must be one line")
    return lines.encode()
