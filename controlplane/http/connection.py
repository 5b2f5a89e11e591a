"""One client's connection: uvicorn's HTTP/1.1 protocol, with bounds on what a client may keep us waiting for.

Layer: service. uvicorn bounds bodies by stopping to read; it bounds neither the size of a request's head nor the time
it may take, nor how long an answer may wait to be read. A client of its could hold a connection, and all that serves
it, for good. It must answer what is no HTTP in the shape of every other error, and nothing after an answer that has
begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from controlplane.alarms import Alarms
from controlplane.http.bounds import HEAD_BYTES, HEAD_S, REST_BYTES

if TYPE_CHECKING:
    import asyncio

    from controlplane.http.server import Connections

MALFORMED = (400, "invalid_http", "invalid_request_error", "This is not a valid HTTP/1.1 request.")
HEAD_TOO_LARGE = (
    431,
    "headers_too_large",
    "invalid_request_error",
    f"The request line and headers are larger than {HEAD_BYTES // 1024} KiB.",
)
HEAD_TOO_LATE = (
    408,
    "request_timeout",
    "invalid_request_error",
    f"The request's headers did not arrive within {HEAD_S:.0f} seconds.",
)
TOO_MANY = (503, "too_many_connections", "server_error", "Too many connections are open; try again.")

Refusal = tuple[int, str, str, str]
"""Status, code, type and message."""


class Connection(HttpToolsProtocol):
    """At any moment at most one alarm is set for a request: for a head that has begun, or for the next one; and one for
    an answer that its client does not read.
    """

    server_state: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._alarms: Alarms = self.server_state.idle_alarms
        """Those that `_alarm` is one of."""
        self._alarm = 0
        self._stall = 0
        self._untaken = 0
        """Bytes of an answer that waited for the client at the last look."""
        self._in_head = False
        self._head_bytes = 0
        self._rest_bytes = 0
        """Of a body whose request has had its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        state = self.server_state
        if len(self.connections) > state.most:
            self._refuse(TOO_MANY)
            return
        self._expect(state.head_alarms)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        self._go_on()
        super().connection_lost(exc)
        self.server_state.left()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(HEAD_TOO_LARGE)
            elif self._alarms is not self.server_state.head_alarms:
                self._expect(self.server_state.head_alarms)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._go_on()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._relax()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._rest_bytes += len(body)
            if self._rest_bytes > REST_BYTES:
                self.transport.close()
            return
        super().on_body(body)

    def on_response_complete(self) -> None:
        state = self.server_state
        state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, application = self.pipeline.pop()
            self._start_asgi_task(cycle, application)
            return
        if state.is_stopping:
            self.transport.close()
            return
        self._rest_bytes = 0
        self._expect(state.head_alarms if self.cycle.more_body else state.idle_alarms)

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

    def _unsupported_upgrade_warning(self) -> None:
        """A client that would speak something else gets HTTP/1.1, as it must expect; that is no event to log."""

    def _expect(self, alarms: Alarms) -> None:
        self._relax()
        self._alarms = alarms
        self._alarm = alarms.set(self._late)

    def _relax(self) -> None:
        if self._alarm:
            self._alarms.drop(self._alarm)
            self._alarm = 0

    def _late(self) -> None:
        self._alarm = 0
        if self._in_head:
            self._refuse(HEAD_TOO_LATE)
        else:
            self.transport.close()

    def _wait_for_reader(self) -> None:
        self._go_on()
        self._untaken = self.transport.get_write_buffer_size()
        self._stall = self.server_state.stall_alarms.set(self._unread)

    def _go_on(self) -> None:
        if self._stall:
            self.server_state.stall_alarms.drop(self._stall)
            self._stall = 0

    def _unread(self) -> None:
        """What waits cannot be sent before the connection ends, so that only an abort ends it."""
        self._stall = 0
        if self.transport.get_write_buffer_size() < self._untaken:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _refuse(self, refusal: Refusal) -> None:
        """Say so, unless an answer has begun, and hang up."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            status, code, kind, message = refusal
            error = {"message": message, "type": kind, "param": None, "code": code}
            body = msgspec.json.encode({"error": error})
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
