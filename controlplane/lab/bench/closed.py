"""One request at a time: the latency that a lone client sees.

Layer: service. Blocking sockets and the monotonic clock, so that nothing of a loop's own is in the figure. Several arms
take turns in short blocks within one run: what disturbs the machine disturbs all of them alike.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.lab.bench.responses import BrokenResponseError, ResponseReader

TIMEOUT_S = 30.0
READ_BYTES = 256 * 1024


class LoadError(Exception):
    """The load could not be run; the message says why in one sentence."""


@dataclass(slots=True)
class Timings:
    """Seconds from sending: to the first token of streams, to the end of every response."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


class Caller:
    """One kept-alive connection to a port of this machine. Use as a context manager."""

    def __init__(self, name: str, port: int, request: bytes) -> None:
        self._name = name
        self._port = port
        self._request = request
        self._socket: socket.socket | None = None

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, timings: Timings | None = None) -> ResponseReader:
        """Send the request and read the answer. Raises LoadError when it is not a whole 200."""
        try:
            return self._call(timings)
        except (OSError, BrokenResponseError) as error:
            self.close()
            raise LoadError(f"{self._name} on port {self._port} gave no whole answer: {error}") from None

    def _call(self, timings: Timings | None) -> ResponseReader:
        connection = self._socket or self._connect()
        reader = ResponseReader()
        first = 0.0
        begun = time.perf_counter()
        connection.sendall(self._request)
        while not reader.complete:
            data = connection.recv(READ_BYTES)
            if not data:
                raise BrokenResponseError("the connection was closed")
            reader.feed(data)
            if not first and reader.stream.tokens:
                first = time.perf_counter()
        ended = time.perf_counter()
        if reader.status != 200:
            raise BrokenResponseError(f"status {reader.status}")
        if reader.closes:
            self.close()
        if timings is not None:
            timings.total.append(ended - begun)
            if first:
                timings.first.append(first - begun)
        return reader

    def _connect(self) -> socket.socket:
        self._socket = socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket


def take_turns(
    arms: Mapping[str, tuple[int, bytes]], *, seconds: float, block: int = 25, warm_up: int = 25
) -> dict[str, Timings]:
    """Each arm's timings, by name: `block` requests of one, then of the next, until `seconds` have passed.

    An arm is a port and the request to send there. Raises LoadError.
    """
    found = {name: Timings() for name in arms}
    with contextlib.ExitStack() as open_:
        callers = {name: open_.enter_context(Caller(name, port, request)) for name, (port, request) in arms.items()}
        for caller in callers.values():
            for _ in range(warm_up):
                caller.call()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name, caller in callers.items():
                for _ in range(block):
                    caller.call(found[name])
    return found
