"""Reads a response on the side, while its bytes go on unchanged.

Layer: service. Pure but for the clock's reading passed in. It learns usage, token times, the finish reason and
in-stream errors, and tells which event must not reach the client: the usage chunk that only the gateway asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.gateway.chunks import Choice, Chunk, ErrorDetail, Usage, read_chunk, read_error, usable
from controlplane.gateway.sse import Event
from controlplane.gateway.timings import StreamTimes

DONE = b"[DONE]"
UNREADABLE = ErrorDetail(message="")
"""An error that is not in OpenAI's shape."""


class ResponseReading:
    """What one response says of itself. `hide_usage` drops the usage chunk from the relayed events."""

    __slots__ = ("done", "error", "finish_reason", "hide_usage", "times", "usage")

    def __init__(self, accepted: float, *, hide_usage: bool) -> None:
        self.times = StreamTimes(accepted)
        self.hide_usage = hide_usage
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.error: ErrorDetail | None = None
        """What an error event said."""
        self.done = False
        """The `[DONE]` event was seen."""

    def read_events(self, events: Sequence[Event], now: float) -> bytes:
        """Read what one network read completed at `now`; returns the bytes to relay."""
        if len(events) == 1:
            return self._read_one(events[0], now)
        return self._read_many(events, now)

    def _read_many(self, events: Sequence[Event], now: float) -> bytes:
        kept: list[bytes] = []
        arrived: dict[int, int] = {}
        visible = False
        for raw, data in events:
            chunk = self._chunk(data) if data is not None else None
            if chunk is None:
                kept.append(raw)
                continue
            if chunk.usage is not None:
                self.usage = chunk.usage
                if not chunk.choices and self.hide_usage:
                    continue
            kept.append(raw)
            for choice in chunk.choices or ():
                tokens, shown = self._read_choice(choice, now)
                if tokens:
                    arrived[choice.index] = arrived.get(choice.index, 0) + tokens
                    visible = visible or shown
        for index, count in arrived.items():
            self.times.arrive(now, index, count, visible=visible)
        return kept[0] if len(kept) == 1 else b"".join(kept)

    def _read_one(self, event: Event, now: float) -> bytes:
        """The same for a single event, as most reads bring."""
        raw, data = event
        chunk = self._chunk(data) if data is not None else None
        if chunk is None:
            return raw
        choices = chunk.choices
        if chunk.usage is not None:
            self.usage = chunk.usage
            if not choices and self.hide_usage:
                return b""
        if not choices:
            return raw
        if len(choices) == 1:
            tokens, shown = self._read_choice(choices[0], now)
            if tokens:
                self.times.arrive(now, choices[0].index, tokens, visible=shown)
            return raw
        return self._read_many((event,), now)

    def _chunk(self, data: bytes) -> Chunk | None:
        """The chunk in an event's data, or None when it is the end mark or nothing to read."""
        if data == DONE:
            self.done = True
            return None
        chunk = read_chunk(data)
        if chunk is not None and chunk.error is not None:
            self.error = self.error or read_error(data) or UNREADABLE
        return chunk

    def read_body(self, body: bytes) -> None:
        """Read a response that was not streamed."""
        chunk = read_chunk(body)
        if chunk is None:
            return
        self.usage = chunk.usage
        for choice in chunk.choices or ():
            self.finish_reason = self.finish_reason or choice.finish_reason

    def settle(self) -> None:
        """The stream is over: bring token times into line with the engine's own count."""
        if self.usage is not None and (tokens := usable(self.usage.completion_tokens)):
            self.times.settle(tokens)

    def _read_choice(self, choice: Choice, now: float) -> tuple[int, bool]:
        """Tokens the chunk carries for this choice, and whether the client shows any of it."""
        if choice.finish_reason:
            self.finish_reason = self.finish_reason or choice.finish_reason
            self.times.finish(now, choice.index)
        logprobs = choice.logprobs
        counted = len(logprobs.content or logprobs.tokens or ()) if logprobs is not None else 0
        delta = choice.delta
        if delta is None:
            holds_token = choice.text is not None and not choice.finish_reason
            return (counted or 1, True) if choice.text else (counted or int(holds_token), False)
        if delta.content or delta.refusal:
            return counted or 1, True
        if delta.reasoning_content or delta.reasoning or delta.tool_calls is not None:
            return counted or 1, False
        if delta.content is not None and delta.role is None and not choice.finish_reason:
            return counted or 1, False  # a token that adds no text yet, such as half a character
        return counted, False
