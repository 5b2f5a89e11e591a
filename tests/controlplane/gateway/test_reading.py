"""Usage, TTFT, TPOT and ITL of one response, whatever its chunking (F25, F26, F27)."""

from __future__ import annotations

import json
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.reading import ResponseReading
from controlplane.gateway.sse import Event
from dataplane.protocol import Histogram


def event(choices: list[dict[str, object]], **fields: object) -> Event:
    data = json.dumps({"choices": choices, **fields}).encode()
    return Event(b"data: " + data + b"\n\n", data)


def text(content: str, index: int = 0, finish: str | None = None, **fields: object) -> Event:
    return event([{"index": index, "delta": {"content": content}, "finish_reason": finish, **fields}])


def delta(index: int = 0, finish: str | None = None, **fields: object) -> Event:
    return event([{"index": index, "delta": fields, "finish_reason": finish}])


def usage(tokens: int, prompt: int = 10, cached: int | None = None) -> Event:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event([], usage={"prompt_tokens": prompt, "completion_tokens": tokens, **details})


def read(reads: list[tuple[float, list[Event]]], *, accepted: float = 0.0, hide: bool = False) -> ResponseReading:
    reading = ResponseReading(accepted, hide_usage=hide)
    for now, events in reads:
        reading.read_events(events, now)
    reading.settle()
    return reading


def test_f25_first_any_and_first_visible_token_are_told_apart() -> None:
    reads = [
        (1.0, [delta(role="assistant", content="")]),
        (2.0, [delta(reasoning_content="hmm")]),
        (3.0, [delta(reasoning_content="so")]),
        (4.5, [text("Yes")]),
    ]
    times = read(reads, accepted=0.5).times
    assert times.ttft == 1.5
    assert times.ttft_visible == 4.0


def test_f25_a_role_is_no_token_and_a_tool_call_is_not_visible() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": ""}}]
    times = read([(1.0, [delta(role="assistant")]), (2.0, [delta(tool_calls=call)])]).times
    assert times.ttft == 2.0
    assert times.ttft_visible is None


def test_f25_an_answer_of_only_an_end_of_sequence_token_has_a_ttft() -> None:
    reading = read([(1.0, [delta(role="assistant")]), (3.0, [delta(finish="stop")]), (3.1, [usage(1)])])
    assert reading.times.ttft == 3.0
    assert reading.times.ttft_visible is None
    assert reading.times.tpot(1) is None


@given(
    st.lists(st.floats(0.001, 2.0), min_size=2, max_size=30),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_f26_tpot_and_ttft_do_not_depend_on_chunking(gaps: list[float], extra: int, random: Random) -> None:
    """The same first and last token at the same times, the tokens between cut into chunks and reads in any way."""
    times = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    n = len(times) + extra
    plain = read([(now, [text("x")]) for now in times] + [(times[-1], [usage(n)])])
    merged: list[tuple[float, list[Event]]] = [(times[0], [text("x")])]
    merged += [(now, [text("xx"), text("x")]) for now in times[1:-1] if random.random() < 0.5]
    merged += [(times[-1], [text("last"), delta(finish="length")]), (times[-1] + 1.0, [usage(n)])]
    chunked = read(merged)
    expected = (times[-1] - times[0]) / (n - 1)
    assert plain.times.tpot(n) == pytest.approx(expected)
    assert chunked.times.tpot(n) == pytest.approx(expected)
    assert chunked.times.ttft == plain.times.ttft == times[0]


def test_f26_the_end_of_sequence_token_counts_and_came_with_the_finish() -> None:
    reads = [(1.0, [text("a")]), (2.0, [text("b")]), (3.0, [delta(finish="stop")]), (9.0, [usage(3)])]
    times = read(reads).times
    assert times.tpot(3) == 1.0
    itl = times.itl(3)
    assert itl is not None
    assert (itl.count, itl.total) == (2, 2.0)


def test_f26_a_finish_without_a_token_of_its_own_does_not_stretch_tpot() -> None:
    reads = [(1.0, [text("a")]), (2.0, [text("b")]), (7.0, [delta(finish="length")]), (7.0, [usage(2)])]
    assert read(reads).times.tpot(2) == 1.0


@pytest.mark.parametrize("tokens", [1, 5])
def test_f27_tpot_is_absent_rather_than_zero_when_no_gap_was_seen(tokens: int) -> None:
    times = read([(1.0, [text("all at once")]), (1.0, [usage(tokens)])]).times
    assert times.tpot(tokens) is None
    assert times.itl(tokens) is None


def test_several_choices_are_timed_apart() -> None:
    reads = [
        (1.0, [text("a", 0)]),
        (2.0, [text("b", 1)]),
        (3.0, [text("a", 0)]),
        (5.0, [text("b", 1)]),
        (5.0, [usage(4)]),
    ]
    times = read(reads).times
    assert times.tpot(4) == pytest.approx(2.5)  # (3−1) and (5−2) over one gap each
    itl = times.itl(4)
    assert itl is not None
    assert itl.count == 2


def test_tokens_listed_in_logprobs_weight_the_gap() -> None:
    listed = {"content": [{"token": "a"}, {"token": "b"}, {"token": "c"}]}
    times = read([(1.0, [text("x")]), (4.0, [text("abc", logprobs=listed)]), (4.0, [usage(4)])]).times
    itl = times.itl(4)
    assert itl is not None
    assert (itl.count, itl.total) == (3, 3.0)
    assert list(itl.buckets) == [0]  # three gaps of one second each


@given(st.lists(st.tuples(st.floats(0.002, 3.0), st.integers(1, 5)), min_size=2, max_size=20))
def test_itl_is_scaled_to_the_engines_count_within_a_bucket(chunks: list[tuple[float, int]]) -> None:
    """Chunks hold k tokens each but look like one: the gaps are shared out by the engine's count."""
    now, reads, n = 0.0, [], 0
    k = chunks[0][1]
    for gap, _ in chunks:
        now += gap
        reads.append((now, [text("x")]))
        n += k
    times = read([*reads, (now, [usage(n)])]).times
    itl = times.itl(n)
    assert itl is not None
    expected = Histogram()
    for gap, _ in chunks[1:]:
        expected.record(gap / k, k)
    assert itl.count == expected.count
    assert itl.total == pytest.approx(expected.total)
    assert itl.count == itl.zero + itl.over + sum(itl.buckets.values())
    assert abs(min(itl.buckets) - min(expected.buckets)) <= 1
    assert abs(max(itl.buckets) - max(expected.buckets)) <= 1


def test_usage_with_cached_tokens_is_read_and_hidden_only_when_asked() -> None:
    chunk = usage(3, prompt=20, cached=16)
    shown, hidden = ResponseReading(0.0, hide_usage=False), ResponseReading(0.0, hide_usage=True)
    assert shown.read_events([chunk], 1.0) == chunk.raw
    assert hidden.read_events([chunk], 1.0) == b""
    for reading in (shown, hidden):
        assert reading.usage is not None
        assert (reading.usage.prompt_tokens, reading.usage.completion_tokens) == (20, 3)
        assert reading.usage.cached_tokens == 16


def test_usage_beside_choices_is_never_dropped() -> None:
    last = event([{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}], usage={"completion_tokens": 1})
    reading = ResponseReading(0.0, hide_usage=True)
    assert reading.read_events([last], 1.0) == last.raw
    assert reading.finish_reason == "stop"


@pytest.mark.parametrize(
    "data",
    [
        b"junk",
        b"[]",
        b'{"choices":7}',
        b'{"choices":[{"index":"a"}]}',
        b'{"choices":[{"delta":{"content":7}}]}',
        b'{"usage":"lots"}',
        b'{"choices":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_cannot_be_read_is_relayed_all_the_same(data: bytes) -> None:
    reading = ResponseReading(0.0, hide_usage=True)
    raw = b"data: " + data + b"\n\n"
    assert reading.read_events([Event(raw, data)], 1.0) == raw
    assert reading.usage is None


def test_a_whole_response_has_usage_and_no_times() -> None:
    reading = ResponseReading(0.0, hide_usage=False)
    body = {
        "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    }
    reading.read_body(json.dumps(body).encode())
    reading.settle()
    assert reading.finish_reason == "length"
    assert reading.usage is not None
    assert reading.usage.cached_tokens == 4


def test_completions_chunks_carry_text() -> None:
    chunks = [event([{"index": 0, "text": "a"}]), event([{"index": 0, "text": "", "finish_reason": "stop"}])]
    reading = read([(1.0, [chunks[0]]), (2.0, [chunks[1]]), (2.0, [usage(2)])])
    assert reading.times.ttft_visible == 1.0
    assert reading.times.tpot(2) == 1.0
    assert not math.isnan(reading.times.ttft or math.nan)
