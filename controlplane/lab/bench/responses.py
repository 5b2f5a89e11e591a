"""Reading HTTP responses with as little work as possible.

Layer: service. Pure. Knows responses with a content-length and chunked event streams, which is all that gateways and
the fake engine send. It counts what streams carry; it checks no more than their end.
"""

from __future__ import annotations

import re

DONE = b"data: [DONE]"
LAST_CHUNK = b"0\r\n\r\n"
_CONTENT = re.compile(rb'"content": ?"[^"]')
"""Text in an event; a role's empty content is none."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class BrokenResponseError(Exception):
    """The bytes are no response that can be read."""


class ResponseReader:
    """Reads one response: `feed` until it returns True."""

    __slots__ = ("_body_at", "_chunked", "_held", "_length", "_seen", "_tail", "closes", "complete", "status", "stream")

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""
        self.closes = False
        """The server will close the connection."""
        self.complete = False
        self.stream = StreamCount()
        self._held = b""
        self._length = -1
        self._chunked = False
        self._seen = 0
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """Whether the response is complete. Raises BrokenResponseError."""
        if self.status == 0:
            self._held += data
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                if len(self._held) > 65536:
                    raise BrokenResponseError("no end of the response's head")
                return False
            data = self._head(self._held[: end + 2], self._held[end + 4 :])
            self._held = b""
        if not self._chunked:
            self._seen += len(data)
            self.complete = self._seen >= self._length
        elif data:
            self.stream.feed(data)
            self._tail = (self._tail + data)[-8:] if len(data) < 8 else data[-8:]
            self.complete = self._tail.endswith(b"\r\n" + LAST_CHUNK) or self._tail == LAST_CHUNK
        return self.complete

    def _head(self, head: bytes, rest: bytes) -> bytes:
        if not head.startswith(b"HTTP/1.1 ") or not head[9:12].isdigit():
            raise BrokenResponseError(f"not a response: {head[:60]!r}")
        self.status = int(head[9:12])
        self.closes = _CLOSE.search(head) is not None
        self._chunked = _CHUNKED.search(head) is not None
        found = _LENGTH.search(head)
        if found is None and not self._chunked:
            raise BrokenResponseError("a response of unknown length")
        self._length = int(found[1]) if found else -1
        return rest


class StreamCount:
    """What a chunked event stream carried: `tokens`, events with text; `writes`, chunks, each a write of the server."""

    __slots__ = ("_frames", "_held", "done", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.done = False
        self._frames = 0
        self._held = b""

    @property
    def writes(self) -> int:
        """Chunks so far, the empty last one included: each has two line ends that no JSON contains."""
        return self._frames // 2

    def feed(self, data: bytes) -> int:
        """Take in a part of the body; the tokens it completed."""
        self._frames += data.count(b"\r")
        if self._held:
            data = self._held + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._held = data
            return 0
        self._held = data[end:] if len(data) - end > 2 else b""
        events = data[:end] if len(data) - end > 2 else data
        tokens = len(_CONTENT.findall(events))
        self.tokens += tokens
        if not tokens or DONE in events:
            self.done = self.done or DONE in events
        return tokens
