"""Server-sent events as bytes: where one event ends and the next begins.

Layer: service. Pure. `EventStream` takes reads of any size and gives back complete events, byte for byte, whatever the
split: inside a UTF-8 character, inside a field name, between CR and LF (F40). It holds back only the event that is
not complete yet, which no client could use anyway. It must never change what an event says.
Source: WHATWG HTML, 9.2.5-9.2.6 (a line ends with LF, CR or CRLF; an empty line ends an event).
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_HELD_BYTES = 256 * 1024
"""An event that grows longer is given back in pieces, without its data."""

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Event(NamedTuple):
    """`raw` is everything to relay, the empty line included; `data` the data lines joined by LF, None if there are
    none.
    """

    raw: bytes
    data: bytes | None


class EventStream:
    """Cuts a byte stream into events: `feed` for each read, `finish` at the end.

    An event whose last byte so far is a CR waits for the next byte, which may be the LF that belongs to it.
    """

    __slots__ = ("_held", "_line", "_line_open", "_oversized")

    def __init__(self) -> None:
        self._held = b""
        """The unfinished event, less what was already given back."""
        self._line = 0
        """Where the last, unfinished line of `_held` starts; everything before is known to hold no empty line."""
        self._line_open = False
        """The line `_held` starts with has bytes that were already given back: it is not empty."""
        self._oversized = False

    @property
    def mid_event(self) -> bool:
        """Whether a part of an unfinished event was already given back."""
        return self._oversized

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes, in order."""
        if not self._held and not self._oversized and _is_one_plain_event(data):
            return [Event(data, data[6:-2])]
        buffer = self._held + data if self._held else data
        events: list[Event] = []
        if b"\r" in buffer:
            self._cut_any(buffer, events)
        else:
            self._cut_lf(buffer, events)
        if len(self._held) > MAX_HELD_BYTES:
            self._give_back(events)
        return events

    def finish(self) -> list[Event]:
        """What is left when the stream ends: at most one event, without its empty line."""
        rest, self._held, self._line = self._held, b"", 0
        return [self._event(rest)] if rest else []

    def _cut_lf(self, buffer: bytes, events: list[Event]) -> None:
        """No CR in sight: an event ends at the first LF that follows a LF or starts a line."""
        start = 0
        search = max(0, self._line - 1)
        while True:
            if buffer[start : start + 1] == b"\n" and not self._line_open:
                end = start + 1
            else:
                found = buffer.find(b"\n\n", search)
                if found < 0:
                    break
                end = found + 2
            events.append(self._event(buffer[start:end]))
            self._line_open = False
            start = search = end
        self._held = buffer[start:] if start else buffer
        self._line = self._held.rfind(b"\n") + 1

    def _cut_any(self, buffer: bytes, events: list[Event]) -> None:
        """Any line ends, mixed as they may come."""
        start, line = 0, self._line
        for match in _LINE_END.finditer(buffer, line):
            if match.end() == len(buffer) and match.group() == b"\r":
                break
            is_empty = match.start() == line and not (line == 0 and self._line_open)
            line = match.end()
            if is_empty:
                events.append(self._event(buffer[start:line]))
                self._line_open = False
                start = line
        self._held = buffer[start:] if start else buffer
        self._line = line - start

    def _give_back(self, events: list[Event]) -> None:
        """Let go of what is held of an event that is too long to keep."""
        keep = b"\r" if self._held.endswith(b"\r") else b""
        piece = self._held[: len(self._held) - len(keep)]
        events.append(Event(piece, None))
        self._line_open = bool(keep) or not piece.endswith(b"\n")
        self._held, self._line, self._oversized = keep, 0, True

    def _event(self, raw: bytes) -> Event:
        if self._oversized:
            self._oversized = False
            return Event(raw, None)
        if _is_one_plain_event(raw):
            return Event(raw, raw[6:-2])
        values = [_value(line) for line in _LINE_END.split(raw) if line.startswith(b"data:") or line == b"data"]
        return Event(raw, b"\n".join(values) if values else None)


def _is_one_plain_event(data: bytes) -> bool:
    """One data line and its empty line, ended by LF: what engines send for a token, mostly one to a read."""
    return (
        data.startswith(b"data: ")
        and data.endswith(b"\n\n")
        and data.find(b"\n") == len(data) - 2
        and b"\r" not in data
    )


def _value(line: bytes) -> bytes:
    return line[5:].removeprefix(b" ")
