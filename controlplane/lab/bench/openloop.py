"""Requests that arrive whether or not earlier ones were answered.

Layer: service. Latency runs from the moment a request was due, not from when it could be sent: a server that stalls
cannot hide behind a client that waits for it (no coordinated omission). One thread, `select` with its microsecond
timeout; the arrivals are drawn beforehand.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.lab.bench.closed import READ_BYTES, LoadError
from controlplane.lab.bench.responses import BrokenResponseError, ResponseReader

MAX_CONNECTIONS = 900
"""`select` knows no descriptor above 1023."""
DRAIN_S = 10.0
"""Longest wait for what is under way at the end."""


@dataclass(slots=True)
class OpenRun:
    """Seconds from the due time to the end of the response, by status; `lost` connections gave none."""

    seconds: float
    by_status: dict[int, list[float]] = field(default_factory=dict)
    lost: int = 0
    crowded: int = 0
    """Requests that had to wait for one of `MAX_CONNECTIONS`."""
    late_s: list[float] = field(default_factory=list)
    """How far behind its due time each request was sent: the load's own share of the latencies."""

    @property
    def answered(self) -> int:
        return sum(len(times) for times in self.by_status.values())

    def times(self, status: int) -> list[float]:
        return self.by_status.get(status, [])


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Poisson arrivals at `rate` a second: seconds from the start, ascending."""
    times: list[float] = []
    at = rng.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def run(port: int, request: bytes, due: Sequence[float], *, connections: int = 8) -> OpenRun:
    """Send `request` at every moment of `due` (seconds from now). Raises LoadError when nothing listens on `port`."""
    load = _Load(port, request, due)
    try:
        load.open(connections)
        return load.run()
    except OSError as error:
        raise LoadError(f"port {port} cannot be loaded: {error.strerror or error}") from None
    finally:
        load.close()


class _Load:
    def __init__(self, port: int, request: bytes, due: Sequence[float]) -> None:
        self._port = port
        self._request = request
        self._due = due
        self._idle: list[socket.socket] = []
        self._busy: dict[socket.socket, tuple[float, ResponseReader]] = {}
        self._found = OpenRun(due[-1] if due else 0.0)

    def open(self, connections: int) -> None:
        self._idle = [self._connect() for _ in range(connections)]

    def close(self) -> None:
        for each in (*self._idle, *self._busy):
            each.close()

    def run(self) -> OpenRun:
        begun = time.perf_counter() + 0.01
        sent = 0
        total = len(self._due)
        while sent < total or self._busy:
            now = time.perf_counter() - begun
            while sent < total and self._due[sent] <= now and self._send(begun + self._due[sent]):
                sent += 1
            if sent == total and now > self._found.seconds + DRAIN_S:
                self._found.lost += len(self._busy)
                break
            blocked = sent < total and self._due[sent] <= now
            wait = 0.05 if blocked or sent == total else self._due[sent] - (time.perf_counter() - begun)
            readable, _, _ = select.select(list(self._busy), (), (), max(0.0, wait))
            for each in readable:
                self._read(each)
        return self._found

    def _send(self, due: float) -> bool:
        """False when every connection is taken."""
        if self._idle:
            connection = self._idle.pop()
        elif len(self._busy) < MAX_CONNECTIONS:
            connection = self._connect()
        else:
            self._found.crowded += 1
            return False
        self._found.late_s.append(time.perf_counter() - due)
        self._busy[connection] = (due, ResponseReader())
        try:
            connection.sendall(self._request)
        except OSError:
            self._lose(connection)
        return True

    def _read(self, connection: socket.socket) -> None:
        due, reader = self._busy[connection]
        try:
            data = connection.recv(READ_BYTES)
            complete = reader.feed(data)
        except (OSError, BrokenResponseError):
            data, complete = b"", False
        if not data:
            self._lose(connection)
        if not complete:
            return
        self._found.by_status.setdefault(reader.status, []).append(time.perf_counter() - due)
        del self._busy[connection]
        if reader.closes:
            connection.close()
        else:
            self._idle.append(connection)

    def _lose(self, connection: socket.socket) -> None:
        self._found.lost += 1
        del self._busy[connection]
        connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port), 5.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
