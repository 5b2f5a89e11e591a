"""Byte-exact relay of event streams at every split point (F40)."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway import sse
from controlplane.gateway.reading import ResponseReading
from controlplane.gateway.sse import Event, EventStream

USAGE = b'{"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'


def chunk(text: str, **fields: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return json.dumps({"id": "x", "choices": [choice], **fields}, ensure_ascii=False).encode()


def event(data: bytes, end: bytes = b"\n") -> bytes:
    return b"data: " + data + end + end


def feed_all(pieces: list[bytes]) -> list[Event]:
    stream = EventStream()
    events = [found for piece in pieces for found in stream.feed(piece)]
    return events + stream.finish()


def relayed(pieces: list[bytes]) -> bytes:
    """What a client gets whose usage chunk the gateway asked for."""
    stream, reading = EventStream(), ResponseReading(0.0, hide_usage=True)
    out = [reading.read_events(stream.feed(piece), 1.0) for piece in pieces]
    out.append(reading.read_events(stream.finish(), 1.0))
    assert reading.usage is not None
    assert reading.usage.completion_tokens == 3
    return b"".join(out)


def streams(end: bytes) -> tuple[bytes, bytes]:
    """A stream as a replica sends it, and what must reach the client."""
    first = event(chunk("zwölf € 🦀"), end) + b": keep-alive" + end + end
    more = b"event: message" + end + event(chunk("日本"), end) + event(b"not json at all", end)
    multi = b"data: {" + end + b'data: "choices": []}' + end + end
    last = event(b"[DONE]", end)
    return first + more + multi + event(USAGE, end) + last, first + more + multi + last


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_f40_usage_chunk_is_removed_byte_exactly_at_every_split_point(end: bytes) -> None:
    sent, expected = streams(end)
    assert relayed([sent]) == expected
    for cut in range(len(sent) + 1):
        assert relayed([sent[:cut], sent[cut:]]) == expected
    assert relayed([sent[i : i + 1] for i in range(len(sent))]) == expected


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_f40_every_pair_of_split_points_around_the_usage_chunk(end: bytes) -> None:
    before, after = event(chunk("é"), end), event(b"[DONE]", end)
    sent = before + event(USAGE, end) + after
    for first in range(len(sent)):
        for second in range(first, len(sent)):
            assert relayed([sent[:first], sent[first:second], sent[second:]]) == before + after


line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)
lines = st.one_of(
    texts.map(lambda text: b"data: " + text.encode()),
    st.sampled_from([b"", b"", b"data", b"data:", b"data:x", b": comment", b"event: e", b"id", b"datax: 1"]),
)
byte_streams = st.lists(st.tuples(lines, line_ends), max_size=12).map(lambda parts: b"".join(a + b for a, b in parts))


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def reference(data: bytes) -> list[tuple[bytes, bytes | None]]:
    """The definition, line by line over the whole: an empty line ends an event."""
    events, raw, values = [], b"", []
    for line, end in re.findall(rb"([^\r\n]*)(\r\n|\n|\r|\Z)", data):
        if not line and not end:
            continue
        raw += line + end
        if line == b"data" or line.startswith(b"data:"):
            values.append(line[5:].removeprefix(b" "))
        if not line:
            events.append((raw, b"\n".join(values) if values else None))
            raw, values = b"", []
    if raw:
        events.append((raw, b"\n".join(values) if values else None))
    return events


@given(byte_streams, st.lists(st.integers(0, 300), max_size=8))
def test_f40_any_split_gives_the_same_events_as_the_definition(data: bytes, cuts: list[int]) -> None:
    found = [(e.raw, e.data) for e in feed_all(split_at(data, cuts))]
    assert found == reference(data)


@given(st.binary(max_size=80), st.lists(st.integers(0, 80), max_size=6))
def test_f40_arbitrary_bytes_come_out_unchanged(data: bytes, cuts: list[int]) -> None:
    assert b"".join(e.raw for e in feed_all(split_at(data, cuts))) == data


@given(byte_streams, st.lists(st.integers(0, 300), max_size=12), st.integers(1, 40))
def test_f40_events_too_long_to_hold_come_out_unchanged_and_unread(data: bytes, cuts: list[int], held: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse, "MAX_HELD_BYTES", held)
        assert b"".join(e.raw for e in feed_all(split_at(data, cuts))) == data


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 40))
def test_an_event_after_one_too_long_to_hold_is_read_again(cuts: list[int], held: int) -> None:
    """The stream finds its way back to event bounds, wherever the long event was cut."""
    tail = b"data: after\n\n"
    long = b"data: " + b"x" * 200 + b"\n\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse, "MAX_HELD_BYTES", 100 + held)
        events = feed_all(split_at(long + tail, cuts))
    assert events[-1] == Event(tail, b"after")


def test_several_events_in_one_read_and_one_event_over_many_reads() -> None:
    whole = event(b"1") + event(b"2") + event(b"3")
    stream = EventStream()
    assert [e.data for e in stream.feed(whole)] == [b"1", b"2", b"3"]
    assert [e.data for piece in (b"da", b"ta: 4", b"\n") for e in stream.feed(piece)] == []
    assert [e.data for e in stream.feed(b"\n")] == [b"4"]


def test_an_event_is_given_back_the_moment_its_empty_line_arrives() -> None:
    stream = EventStream()
    assert stream.feed(b"data: 1\r\n\r") == []
    assert stream.feed(b"\n") == [Event(b"data: 1\r\n\r\n", b"1")]
    assert stream.feed(event(b"2")) == [Event(event(b"2"), b"2")]
