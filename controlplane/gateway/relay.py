"""One replica's answer on its way to the client.

Layer: service. Streams go through event by event as they arrive, everything else as one body; bytes are never changed,
only the usage chunk that the gateway itself asked for is left out. What a replica says about the gateway's own
credentials or address never reaches a client. An interrupted stream ends with an error event, at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from litestar.types import Send

from controlplane.errors import InvalidRequestError, TidegateError, UpstreamError
from controlplane.gateway.asgi import JSON_TYPE, Headers, respond, send_head, send_part
from controlplane.gateway.chunks import ErrorDetail, read_error
from controlplane.gateway.errors import capacity, error_body, error_event
from controlplane.gateway.http_client import HttpError, Response
from controlplane.gateway.reading import ResponseReading
from controlplane.gateway.record import Outcome, RequestRecord
from controlplane.gateway.sse import EventStream
from controlplane.gateway.upstream import Cause, UpstreamFailure, failure_of
from controlplane.layers import Layer
from dataplane.protocol import HEADER_REQUEST

MAX_BODY_BYTES = 32 * 1024 * 1024
"""A longer answer that was not streamed is not relayed."""

KNOWN_CODES = frozenset(
    {
        "context_length_exceeded",
        "invalid_value",
        "invalid_type",
        "invalid_json",
        "invalid_request",
        "invalid_grammar",
        "constraint_unsatisfiable",
        "missing_parameter",
        "missing_required_parameter",
        "unknown_parameter",
        "unsupported_value",
        "unsupported_parameter",
        "model_not_found",
        "request_too_large",
        "rate_limit_exceeded",
        "overloaded",
    }
)
"""What a replica found wrong with a request, counted by its code; any other refusal counts as `upstream_<status>`."""

FINISHES = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "unknown"})
"""Finish reasons that are counted by name; any other counts as `other`, none at all as `unknown`."""

logger = logging.getLogger("tidegate.gateway")


class Relay:
    """Relays one response and notes in the request's record what it saw. `on_first` is called when the record has
    learned of a first token, any or visible. `headers` go on the answer, whatever it is.
    """

    def __init__(
        self,
        record: RequestRecord,
        send: Send,
        *,
        hide_usage: bool,
        on_first: Callable[[RequestRecord], None],
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._record = record
        self._send = send
        self._headers = headers
        self._on_first = on_first
        self.reading = ResponseReading(record.accepted, hide_usage=hide_usage)
        self.started = False
        """Whether the client has been sent anything."""

    async def relay(self, response: Response) -> None:
        """The whole answer. Raises UpstreamFailure or UpstreamError only while `started` is False."""
        if response.status == 200 and response.content_type == b"text/event-stream":
            await self._stream(response)
        else:
            await self._whole(response)

    async def interrupt(self, failure: UpstreamFailure, error: TidegateError, *, mid_event: bool = False) -> None:
        """End a stream that has begun with an error event."""
        self._record.conclude(Outcome.FAILED, failure.cause.value, 200)
        gap = b"\n\n" if mid_event else b""
        await send_part(self._send, gap + error_event(error), more=False)

    def finished(self, status: int) -> None:
        """The answer is complete."""
        reason = self.reading.finish_reason or "unknown"
        self._record.conclude(Outcome.FINISHED, reason if reason in FINISHES else "other", status)

    def settle(self) -> None:
        """Take over into the record what the stream said."""
        record, reading = self._record, self.reading
        reading.settle()
        record.take_usage(reading.usage)
        if record.stream:
            record.ttft_s = reading.times.ttft
            record.ttft_visible_s = reading.times.ttft_visible
            if record.outcome is Outcome.FINISHED and record.output_tokens:
                record.tpot_s = reading.times.tpot(record.output_tokens)
                record.itl = reading.times.itl(record.output_tokens)

    async def _stream(self, response: Response) -> None:
        record, reading, send = self._record, self.reading, self._send
        record.stream = True
        headers: Headers = [
            (b"content-type", response.headers[b"content-type"]),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (HEADER_REQUEST.encode(), record.request_id.encode()),
            *self._headers,
        ]
        await send_head(send, 200, headers)
        self.started = True
        events = EventStream()
        waiting = True
        try:
            while data := await response.read():
                part = reading.read_events(events.feed(data), time.monotonic())
                if part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                if waiting and reading.times.first is not None:
                    waiting = reading.times.first_visible is None
                    record.ttft_s, record.ttft_visible_s = reading.times.ttft, reading.times.ttft_visible
                    self._on_first(record)
        except HttpError as error:
            await self._broken(failure_of(error), events)
            return
        rest = reading.read_events(events.finish(), time.monotonic())
        if reading.error is not None:
            record.conclude(Outcome.FAILED, _fault(reading.error), 200)
        elif reading.done or reading.finish_reason:
            self.finished(200)
        else:
            await self._broken(UpstreamFailure(Cause.TRUNCATED), events)
            return
        await send_part(send, rest, more=False)

    async def _broken(self, failure: UpstreamFailure, events: EventStream) -> None:
        """The replica went away in mid-stream: unless the answer was complete, the client is told so."""
        if self.reading.done:
            self.finished(200)
            await send_part(self._send, b"", more=False)
            return
        error = UpstreamError("The replica stopped before the answer was complete.", code=failure.cause.value)
        await self.interrupt(failure, error, mid_event=events.mid_event)

    async def _whole(self, response: Response) -> None:
        status = response.status
        if 200 <= status < 300:
            self._record.stream = False  # whatever was asked for
        body = await self._read(response)
        if 200 <= status < 300:
            self.reading.read_body(body)
            self.started = True
            self.finished(status)
            await self._answer(status, body, response)
        elif status in {401, 403, 407} or status < 400:
            logger.error("Replica %s answered %d to the gateway itself", self._record.replica, status)
            raise UpstreamFailure(Cause.PROTOCOL)
        elif status >= 500:
            await self._server_error(status, body, response)
        else:
            await self._refusal(status, body, response)

    async def _refusal(self, status: int, body: bytes, response: Response) -> None:
        """4xx: the replica's own words when they are an OpenAI error, else ours with its status."""
        detail = read_error(body)
        code = detail.code if detail else None
        self._record.conclude(Outcome.REFUSED, code if code in KNOWN_CODES else f"upstream_{status}", status)
        if detail is None:
            body = error_body(InvalidRequestError("The model's server refused the request.", code=f"upstream_{status}"))
        self.started = True
        await self._answer(status, body, response)

    async def _server_error(self, status: int, body: bytes, response: Response) -> None:
        """5xx: relayed when it is an OpenAI error; 503 says when to come back."""
        if read_error(body) is None:
            raise UpstreamFailure(Cause.ERROR)
        self.started = True
        if status == 503:
            self._record.conclude(Outcome.REFUSED, "replica_unavailable", status)
            refusal = capacity("The replica cannot serve now.", "replica_unavailable", layer=Layer.RUNTIME)
            await self._answer(status, body, response, refusal)
        else:
            self._record.conclude(Outcome.FAILED, Cause.ERROR.value, status)
            await self._answer(status, body, response)

    async def _read(self, response: Response) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            while data := await response.read():
                size += len(data)
                if size > MAX_BODY_BYTES:
                    raise UpstreamFailure(Cause.PROTOCOL)
                parts.append(data)
        except HttpError as error:
            failure = failure_of(error)  # the replica has done the work: not one to send again
            raise UpstreamFailure(Cause.TRUNCATED) if failure.cause is Cause.RESET else failure from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _answer(self, status: int, body: bytes, response: Response, refusal: TidegateError | None = None) -> None:
        """Send `body` unchanged, with the headers of `refusal` where the replica has none of its own."""
        named = dict(refusal.headers) if refusal else {}
        retry_after = response.headers.get(b"retry-after", b"")
        if retry_after.isdigit():
            named["retry-after"] = retry_after.decode()
        headers: Headers = [JSON_TYPE, (HEADER_REQUEST.encode(), self._record.request_id.encode())]
        headers += [(name.encode(), value.encode()) for name, value in named.items()]
        headers += self._headers
        await respond(self._send, status, body, headers)


def _fault(error: ErrorDetail) -> str:
    """What an error in mid-stream counts as: by its code when the request itself was at fault, else the replica's."""
    if error.type == InvalidRequestError.type and error.code in KNOWN_CODES:
        return str(error.code)
    return Cause.ERROR.value
