"""Every check lets good figures pass and fails on bad ones."""

from __future__ import annotations

from collections import Counter

import pytest

from controlplane.lab.chaos import checks
from controlplane.lab.chaos.checks import Allowed, Answers, Row, Standing, Tokens

ENGINES = {"a": Tokens(500, 10), "b": Tokens(500, 0)}
LEDGER = {"a": Row("engine", 500, 10), "b": Row("engine", 500, 0)}
IDLE = Standing("concurrent", 0, 5, concurrent=True)


def test_a_ledger_that_agrees_to_the_token_passes() -> None:
    found = checks.compare(ENGINES, LEDGER)
    assert (found.tokens, found.attempts, found.told_by_others, found.problems) == (0, 2, 0, ())


@pytest.mark.parametrize(
    ("ledger", "tokens", "says"),
    [
        ({**LEDGER, "a": Row("engine", 500, 9)}, -1, "1 attempts have other tokens"),
        ({**LEDGER, "a": Row("engine", 501, 10)}, 1, "1 attempts have other tokens"),
        ({"a": LEDGER["a"]}, -500, "1 attempts are not in the ledger (b)"),
        ({**LEDGER, "c": Row("engine", 1, 1)}, 0, "1 attempts are in the ledger as counted by an engine"),
    ],
    ids=["a token is missing", "a token too many", "an attempt is missing", "an attempt nobody made"],
)
def test_f15_a_ledger_that_differs_fails(ledger: dict[str, Row], tokens: int, says: str) -> None:
    found = checks.compare(ENGINES, ledger)
    assert found.tokens == tokens
    assert len(found.problems) == 1
    assert found.problems[0].startswith(says)


def test_errors_that_cancel_out_in_the_sum_are_found_by_attempt() -> None:
    found = checks.compare(ENGINES, {"a": Row("engine", 500, 9), "b": Row("engine", 500, 1)})
    assert found.tokens == 0
    assert found.problems


def test_what_gateways_alone_can_tell_is_shown_and_no_error() -> None:
    found = checks.compare(ENGINES, {**LEDGER, "c": Row("counted", 500, 3)})
    assert (found.told_by_others, found.tokens, found.problems) == (1, 0, ())


def test_a_negative_balance_fails() -> None:
    assert checks.counters([IDLE]) == []
    assert checks.counters([IDLE, Standing("tokens", -1, 10, concurrent=False)]) == ["tokens stands at -1"]


@pytest.mark.parametrize(
    ("used", "gateway", "deferred"), [(1, 0.0, 0.0), (0, 1.0, 0.0), (0, 0.0, 1.0)], ids=["slot", "request", "ending"]
)
def test_f12_a_leak_fails(used: int, gateway: float, deferred: float) -> None:
    standing = Standing("concurrent", used, 5, concurrent=True)
    leaked = checks.leak([IDLE, standing], {"gateway": gateway}, {"gateway": deferred})
    assert leaked == 1
    assert checks.in_flight(leaked, 10.0, 6.0)


def test_nothing_in_flight_passes_and_not_knowing_fails() -> None:
    tokens = Standing("tokens_per_day", 700, 1000, concurrent=False)
    leaked = checks.leak([IDLE, tokens], {"gateway": 0.0}, {"gateway": 0.0})
    assert leaked == 0
    assert checks.in_flight(leaked, 1.0, 6.0) == []
    assert checks.in_flight(None, 10.0, 6.0)


@pytest.mark.parametrize(
    ("seen", "allowed", "says"),
    [
        (Answers(2, ok=1, refused=Counter({"401 invalid_api_key": 1})), Allowed(), "401"),
        (Answers(2, ok=1, refused=Counter({"500 internal_error": 1})), Allowed(), "500 internal_error"),
        (Answers(2, ok=1, refused=Counter({"503 a": 1})), Allowed(frozenset({"503 b"})), "503 a"),
        (Answers(2, ok=1, cut=1), Allowed(unanswered=True), "cut"),
        (Answers(2, ok=1, unanswered=1), Allowed(cut=True), "no answer"),
        (Answers(1, left=1), Allowed(), "no request was served"),
    ],
)
def test_f14_f15_answers_that_were_not_declared_fail(seen: Answers, allowed: Allowed, says: str) -> None:
    (problem,) = checks.answers(seen, allowed)
    assert says in problem


def test_declared_answers_pass() -> None:
    seen = Answers(5, ok=1, cut=1, unanswered=1, refused=Counter({"429 x_exceeded": 1, "503 away": 1}))
    assert checks.answers(seen, Allowed(frozenset({"503 away"}), cut=True, unanswered=True)) == []


def test_an_outage_that_nothing_shows_fails() -> None:
    assert checks.states({"redis away"}, ["redis away"]) == []
    assert checks.states(set(), ["redis away"])


def test_what_does_not_recover_fails() -> None:
    assert checks.recovery(3.0, 60.0) == []
    assert checks.recovery(None, 60.0)
