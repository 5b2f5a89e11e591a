"""One attempt: its text, its timings and its one usage record, whatever the chunks and however it ends."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.attempt import Attempt, Choice
from dataplane.caller import Caller
from dataplane.detokenizer import StopScanner
from dataplane.protocol import FinishReason, RequestOutput, ServiceCounters, Timing, UsageBasis, UsageRecord


class Letters:
    """A detokenizer of one letter per token, over the engine's own stop scanner."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._scanner = StopScanner(stop)

    @property
    def stopped(self) -> str | None:
        return self._scanner.found

    def push(self, token_ids: Iterable[int]) -> str:
        return self._scanner.push("".join(chr(token) for token in token_ids))

    def flush(self) -> str:
        return self._scanner.flush()


class Clockwork:
    """A host whose clock the test turns; it keeps what an attempt asks of it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.counters = ServiceCounters()
        self.aborted: list[str] = []
        self.finished: list[Attempt] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1_700_000_000.0

    def service(self) -> ServiceCounters:
        return self.counters

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def ended(self, attempt: Attempt) -> None:
        self.finished.append(attempt)


def begin(host: Clockwork, *, choices: int = 1, stop: tuple[str, ...] = ()) -> Attempt:
    caller = Caller(attempt_id="attempt", request_id="request", tenant="demo", key_id="key", project="apollo")
    attempt = Attempt(caller, host, accepted=host.now, model="model")
    for index in range(choices):
        attempt.choices.append(Choice(attempt, index, f"attempt-{index}", range(10), Letters(stop)))
    return attempt


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def output(
    text: str = "", finish: FinishReason | None = None, timing: Timing | None = None, **more: object
) -> RequestOutput:
    return RequestOutput(request_id="attempt-0", token_ids=tokens(text), finish=finish, timing=timing, **more)  # type: ignore[arg-type]


def record(attempt: Attempt) -> UsageRecord:
    return attempt.usage_record(pool="pool", replica="replica", boot_epoch=7)


def run_in_chunks(text: str, cuts: list[int]) -> ServiceCounters:
    """Generate `text`, one token per 10 ms on the core's clock, arriving in chunks cut at `cuts`."""
    host = Clockwork()
    attempt = begin(host)
    (choice,) = attempt.choices
    edges = sorted({*cuts, len(text)})
    previous = 0
    for edge in edges:
        host.now = 1000.0 + 0.2 + edge * 0.01
        last = edge == len(text)
        timing = Timing(queued=5.0, scheduled=5.1, first_token=5.2, last_token=5.2 + 0.01 * (edge - 1))
        choice.take(output(text[previous:edge], FinishReason.LENGTH if last else None, timing))
        previous = edge
    assert choice.read() == text
    return host.counters


@settings(deadline=None)
@given(st.lists(st.integers(1, 19), max_size=10))
def test_f26_tpot_does_not_depend_on_how_tokens_are_chunked(cuts: list[int]) -> None:
    service = run_in_chunks("abcdefghijklmnopqrst", cuts)
    assert service.tpot is not None
    assert service.tpot.count == 1
    assert service.tpot.total == pytest.approx(0.01)
    assert service.decode is not None
    assert service.decode.total == pytest.approx(0.19)
    assert service.queue is not None
    assert service.queue.total == pytest.approx(0.1)
    assert service.prefill is not None
    assert service.prefill.total == pytest.approx(0.1)
    assert service.itl is not None
    assert service.itl.count == 19, "one gap for every token after the first"


def test_one_token_has_a_ttft_but_no_tpot() -> None:
    service = run_in_chunks("a", [])
    assert service.ttft is not None
    assert service.ttft.count == 1
    assert service.tpot is None
    assert service.itl is None


def test_ttft_runs_from_the_acceptance_at_the_front() -> None:
    host = Clockwork()
    attempt = begin(host)
    host.now += 0.75
    attempt.choices[0].take(output("a"))
    assert host.counters.ttft is not None
    assert host.counters.ttft.total == pytest.approx(0.75)


def test_a_stop_string_ends_the_text_and_frees_the_sequence_at_once() -> None:
    host = Clockwork()
    attempt = begin(host, stop=("XY",))
    (choice,) = attempt.choices
    choice.take(output("abX"))
    assert choice.read() == "ab"
    choice.take(output("Yc"))
    assert choice.read() == "", "a token came, and shows nothing"
    assert choice.finish is FinishReason.STOP
    assert host.aborted == ["attempt-0"]
    assert attempt.finished
    assert not attempt.ended
    choice.take(output("zzz"))
    choice.take(output("", FinishReason.ABORT, Timing(queued=1, scheduled=1, first_token=1, last_token=2)))
    assert choice.read() is None
    usage = record(attempt)
    assert usage.finish == "stop"
    assert usage.output_tokens == 5, "as the client was told: nothing behind the stop"
    assert usage.basis is UsageBasis.ENGINE
    assert host.finished == [attempt]


def test_what_was_held_back_for_a_stop_string_comes_at_the_end() -> None:
    host = Clockwork()
    attempt = begin(host, stop=("XYZ",))
    (choice,) = attempt.choices
    choice.take(output("abXY"))
    assert choice.read() == "ab"
    choice.take(output("", FinishReason.LENGTH))
    assert choice.read() == "XY"


def test_a_token_that_ends_by_its_id_is_counted_but_not_shown() -> None:
    host = Clockwork()
    attempt = begin(host)
    (choice,) = attempt.choices
    choice.take(output("hi!", FinishReason.STOP, Timing(queued=1, scheduled=1, first_token=1, last_token=1)))
    assert choice.read() == "hi"
    assert record(attempt).output_tokens == 3


def test_a_cancelled_attempt_pays_for_what_the_engine_made() -> None:
    host = Clockwork()
    attempt = begin(host)
    (choice,) = attempt.choices
    choice.take(output("abc", cached_tokens=4))
    attempt.cancel()
    assert host.aborted == ["attempt-0"]
    choice.take(output("d"))
    timing = Timing(queued=1, scheduled=1, first_token=1, last_token=2)
    choice.take(output("", FinishReason.ABORT, timing, kv_block_seconds=2.5, device_seconds=0.5))
    usage = record(attempt)
    assert (usage.finish, usage.basis) == ("abort", UsageBasis.ENGINE)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (10, 4, 4)
    assert (usage.kv_block_seconds, usage.device_seconds) == (2.5, 0.5)


def test_an_attempt_that_never_left_the_queue_costs_nothing() -> None:
    host = Clockwork()
    attempt = begin(host)
    attempt.choices[0].take(output("", FinishReason.ABORT, Timing(queued=1.0)))
    usage = record(attempt)
    assert (usage.prompt_tokens, usage.output_tokens) == (0, 0)
    assert usage.basis is UsageBasis.ENGINE


def test_f7_a_dead_core_leaves_the_fronts_own_count() -> None:
    host = Clockwork()
    attempt = begin(host)
    (choice,) = attempt.choices
    choice.take(output("abc"))
    choice.take(RequestOutput(request_id="attempt-0", finish=FinishReason.ERROR, error="the core was killed"))
    usage = record(attempt)
    assert (usage.finish, usage.basis) == ("error", UsageBasis.COUNTED)
    assert (usage.prompt_tokens, usage.output_tokens) == (10, 3)
    assert attempt.failure is choice
    assert host.counters.finished == {"error": 1}


def test_several_choices_make_one_record_when_the_last_ends() -> None:
    host = Clockwork()
    attempt = begin(host, choices=3)
    timing = Timing(queued=1, scheduled=1, first_token=1, last_token=2)
    for index, (text, finish) in enumerate((("ab", FinishReason.STOP), ("c", FinishReason.LENGTH))):
        attempt.choices[index].take(output(text, finish, timing))
    assert host.finished == []
    attempt.choices[2].take(output("def", FinishReason.LENGTH, timing))
    assert host.finished == [attempt]
    usage = record(attempt)
    assert (usage.prompt_tokens, usage.output_tokens, usage.finish) == (30, 6, "length")
    assert (usage.tenant, usage.project, usage.key_id) == ("demo", "apollo", "key")


def test_a_defect_in_the_text_path_ends_only_that_sequence() -> None:
    class Broken(Letters):
        def push(self, token_ids: Iterable[int]) -> str:
            raise RuntimeError("broken")

    host = Clockwork()
    attempt = begin(host)
    choice = Choice(attempt, 0, "attempt-0", range(10), Broken())
    attempt.choices[0] = choice
    choice.take(output("a"))
    assert choice.finish is FinishReason.ERROR
    assert host.aborted == ["attempt-0"]
    choice.take(output("", FinishReason.ABORT, Timing(queued=1, scheduled=1)))
    assert record(attempt).finish == "error"


def test_a_slow_reader_finds_all_text_in_one_piece() -> None:
    host = Clockwork()
    attempt = begin(host)
    (choice,) = attempt.choices
    for letter in "streaming":
        choice.take(output(letter))
    assert choice.read() == "streaming"
    assert choice.read() is None
