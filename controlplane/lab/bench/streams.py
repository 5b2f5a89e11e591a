"""Streaming load: many event streams at once, counted token by token and write by write.

Layer: service. Raw HTTP on uvloop. In the acknowledged mode every stream has one token under way at a time: this side
tells the fake engine (by UDP) that a token has arrived, and only then the engine writes the next. So each token costs
whatever lies between a read and a write of its own, and nothing can save work by passing several on at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import uvloop

from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.engine import RECEIPT
from controlplane.lab.bench.responses import BrokenResponseError, ResponseReader


@dataclass(slots=True)
class StreamRun:
    """What `seconds` of steady streaming carried. `first` are the seconds to each stream's first token."""

    seconds: float = 0.0
    tokens: int = 0
    writes: int = 0
    streams: int = 0
    """Streams that ended whole."""
    first: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_write(self) -> float:
        return self.tokens / self.writes if self.writes else 0.0


def run(
    port: int,
    requests: list[bytes],
    *,
    seconds: float,
    warm_up: float = 0.5,
    receipts: int | None = None,
    on_begin: Callable[[], None] = lambda: None,
    on_end: Callable[[], None] = lambda: None,
) -> StreamRun:
    """Stream all `requests` at once, each again as soon as it ends, and count `seconds` after `warm_up`.

    `receipts` is the port of the fake engine that waits for them. `on_begin` and `on_end` are called where the counted
    span begins and ends. Raises LoadError.
    """

    async def load() -> StreamRun:
        return await _Load(port, requests, receipts).run(seconds, warm_up, on_begin, on_end)

    return uvloop.run(load())


class _Load:
    def __init__(self, port: int, requests: list[bytes], receipts: int | None) -> None:
        self._port = port
        self._requests = requests
        self._receipts_port = receipts
        self._run: StreamRun | None = None
        self._tokens = self._writes = 0
        self._arrived = bytearray()
        self._endpoint: asyncio.DatagramTransport | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopping = False

    async def run(
        self, seconds: float, warm_up: float, on_begin: Callable[[], None], on_end: Callable[[], None]
    ) -> StreamRun:
        loop = asyncio.get_running_loop()
        clients: list[asyncio.Transport] = []
        found = StreamRun()
        try:
            if self._receipts_port is not None:
                self._endpoint, _ = await loop.create_datagram_endpoint(
                    asyncio.DatagramProtocol, remote_addr=("127.0.0.1", self._receipts_port)
                )
            for number, request in enumerate(self._requests):
                transport, _ = await loop.create_connection(
                    lambda n=number, r=request: _Client(self, n, r),  # type: ignore[misc]  # bound now
                    "127.0.0.1",
                    self._port,
                )
                clients.append(transport)
            await self._pass(warm_up)
            on_begin()
            begun, tokens, writes = time.perf_counter(), self._tokens, self._writes
            self._run = found
            await self._pass(seconds)
            found.seconds = time.perf_counter() - begun
            found.tokens, found.writes = self._tokens - tokens, self._writes - writes
            on_end()
        except OSError as error:
            raise LoadError(f"port {self._port} cannot be loaded: {error.strerror or error}") from None
        finally:
            self.stopping = True
            for transport in clients:
                transport.abort()
            if self._endpoint is not None:
                self._endpoint.close()
        if not found.tokens:
            raise LoadError(f"port {self._port} streamed nothing in {seconds:g} s")
        return found

    async def _pass(self, seconds: float) -> None:
        """Let time pass; raises LoadError as soon as a stream fails."""
        done, _ = await asyncio.wait({self._failed}, timeout=seconds)
        if done:
            self._failed.result()

    def fail(self, why: str) -> None:
        if not self.stopping and not self._failed.done():
            self._failed.set_exception(LoadError(f"a stream from port {self._port} failed: {why}"))

    def took(self, number: int, tokens: int, writes: int) -> None:
        """A stream has brought something."""
        self._tokens += tokens
        self._writes += writes
        if tokens and self._endpoint is not None:
            if not self._arrived:
                asyncio.get_running_loop().call_soon(self._acknowledge)
            self._arrived += RECEIPT.pack(number)

    def ended(self, first: float) -> None:
        if self._run is not None:
            self._run.streams += 1
            self._run.first.append(first)

    def _acknowledge(self) -> None:
        if self._endpoint is not None and not self._endpoint.is_closing():
            self._endpoint.sendto(bytes(self._arrived))
        self._arrived.clear()


class _Client(asyncio.Protocol):
    """One stream after another on one connection."""

    def __init__(self, load: _Load, number: int, request: bytes) -> None:
        self._load = load
        self._number = number
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._begun = self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so
        self._begin()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.fail(f"the connection was closed ({error})" if error else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        reader, count = self._reader, self._reader.stream
        tokens, writes = count.tokens, count.writes
        try:
            complete = reader.feed(data)
        except BrokenResponseError as error:
            self._load.fail(str(error))
            return
        if reader.status not in {0, 200}:
            self._load.fail(f"status {reader.status}")
            return
        if not self._first and count.tokens:
            self._first = time.perf_counter() - self._begun
        self._load.took(self._number, count.tokens - tokens, count.writes - writes)
        if complete:
            if not count.done:
                self._load.fail("it ended without [DONE]")
                return
            self._load.ended(self._first)
            self._begin()

    def _begin(self) -> None:
        assert self._transport is not None
        self._reader = ResponseReader()
        self._first = 0.0
        self._begun = time.perf_counter()
        self._transport.write(self._request)
