"""When a limit is exhausted: the forecast's promises, for any numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.quotas.forecast import FEWEST, Outcome, Rate, forecast
from controlplane.quotas.schemas import Raise

NOW = 1_700_000_000.0
spans = st.tuples(st.floats(-500, 500), st.floats(0, 500)).map(lambda pair: (NOW + pair[0], NOW + sum(pair)))
raises = st.lists(
    st.builds(
        lambda amount, span: Raise(amount=amount, starts_at=span[0], expires_at=span[1]), st.integers(1, 500), spans
    ),
    max_size=6,
)
rates = st.builds(Rate, units=st.integers(0, 100_000), n=st.integers(0, 20), window_s=st.floats(1, 3600))


def rate(units: int, *, n: int = 10, window_s: float = 100.0) -> Rate:
    return Rate(units=units, n=n, window_s=window_s)


def limit_at(hard: int, given: list[Raise], at: float) -> int:
    return hard + sum(one.amount for one in given if one.starts_at <= at < one.expires_at)


def test_at_a_steady_rate_what_is_left_is_gone_when_it_is_used_up() -> None:
    told = forecast(1000, [], used=400, rate=rate(200), now=NOW, resets_at=NOW + 3600)
    assert (told.outcome, told.at) == (Outcome.EXHAUSTS, NOW + 300)


def test_a_reset_that_comes_before_is_an_answer_of_its_own() -> None:
    assert forecast(1000, [], used=400, rate=rate(200), now=NOW, resets_at=NOW + 299).outcome is (
        Outcome.NOT_BEFORE_RESET
    )


@pytest.mark.parametrize("n", range(FEWEST))
def test_too_few_attempts_foretell_nothing(n: int) -> None:
    told = forecast(1000, [], used=400, rate=rate(200, n=n), now=NOW, resets_at=NOW + 3600)
    assert (told.outcome, told.at) == (Outcome.NOT_ENOUGH_DATA, None)


def test_what_is_exhausted_is_so_whatever_the_rate() -> None:
    assert forecast(10, [], used=10, rate=rate(0, n=0), now=NOW, resets_at=NOW + 1).outcome is Outcome.EXHAUSTED


def test_a_raise_that_ends_takes_the_limit_below_what_is_used() -> None:
    given = [Raise(amount=500, starts_at=NOW - 1, expires_at=NOW + 60)]
    told = forecast(1000, given, used=1100, rate=rate(100), now=NOW, resets_at=NOW + 3600)
    assert (told.outcome, told.at) == (Outcome.EXHAUSTS, NOW + 60)


def test_a_raise_to_come_is_counted_on() -> None:
    given = [Raise(amount=10_000, starts_at=NOW + 10, expires_at=NOW + 9999)]
    assert forecast(1000, given, used=900, rate=rate(100), now=NOW, resets_at=NOW + 3600).outcome is (
        Outcome.NOT_BEFORE_RESET
    )


@given(hard=st.integers(1, 2000), given_=raises, used=st.integers(0, 2500), rate=rates, left=st.floats(1, 4000))
def test_it_names_the_first_instant_at_which_use_reaches_the_limit(
    hard: int, given_: list[Raise], used: int, rate: Rate, left: float
) -> None:
    told = forecast(hard, given_, used=used, rate=rate, now=NOW, resets_at=NOW + left)

    def room(at: float) -> float:
        return limit_at(hard, given_, at) - used - rate.per_s * (at - NOW)

    slack = 1e-6 * (1 + hard + used + 2500)
    if used >= limit_at(hard, given_, NOW):
        assert told.outcome is Outcome.EXHAUSTED
        return
    if rate.n < FEWEST:
        assert told.outcome is Outcome.NOT_ENOUGH_DATA
        return
    last = told.at if told.at is not None else NOW + left
    assert (told.outcome is Outcome.EXHAUSTS) == (told.at is not None)
    assert NOW <= last <= NOW + left
    for step in range(20):
        assert room(NOW + (last - NOW) * step / 20) > -slack
    if told.at is not None:
        assert told.at < NOW + left
        assert room(told.at) < slack + rate.per_s * 1e-5


@given(hard=st.integers(1, 2000), used=st.integers(0, 1999), rate=rates, more=st.integers(1, 1000))
def test_a_higher_limit_is_never_exhausted_sooner(hard: int, used: int, rate: Rate, more: int) -> None:
    low, high = (
        forecast(each, [], used=used, rate=rate, now=NOW, resets_at=NOW + 3600) for each in (hard, hard + more)
    )
    if high.outcome is Outcome.EXHAUSTED:
        assert low.outcome is Outcome.EXHAUSTED
    if high.at is not None:
        assert low.outcome is Outcome.EXHAUSTED or (low.at is not None and low.at <= high.at)
