"""When a limit is exhausted if use goes on as it does.

Layer: service. Pure: numbers in, an answer out. The method is linear: the mean rate of a recent window goes on, while
the limit follows its temporary raises. It is an estimate and says what it rests on; it never guesses from too little.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from controlplane.quotas.schemas import Raise

METHOD = "linear"
FEWEST = 5
"""Attempts in the window below which nothing is foretold."""


class Outcome(enum.StrEnum):
    """What becomes of a limit."""

    EXHAUSTED = "exhausted"
    """All of it is used or reserved now."""
    EXHAUSTS = "exhausts"
    NOT_BEFORE_RESET = "not_before_reset"
    NOT_ENOUGH_DATA = "not_enough_data"
    NOT_APPLICABLE = "not_applicable"
    """Nothing adds up against it, or it refuses nothing."""
    UNKNOWN = "unknown"
    """What is used of it cannot be told now."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Units used in the last `window_s` seconds, by `n` attempts."""

    units: int
    n: int
    window_s: float

    @property
    def per_s(self) -> float:
        return self.units / self.window_s


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is when the limit is exhausted, Unix seconds, for EXHAUSTS alone."""

    outcome: Outcome
    at: float | None = None


def forecast(hard: int, raises: Sequence[Raise], *, used: int, rate: Rate, now: float, resets_at: float) -> Forecast:
    """When `used` units, growing at `rate`, reach `hard` with the raises in force then; all times Unix seconds.

    Use starts anew at `resets_at`; of a sliding window that is `now` and its length: if it is ever exhausted at this
    rate, then before that.
    """
    if used >= _at(hard, raises, now):
        return Forecast(outcome=Outcome.EXHAUSTED)
    if rate.n < FEWEST:
        return Forecast(outcome=Outcome.NOT_ENOUGH_DATA)
    for start, end in _spans(raises, now, resets_at):
        reached = start
        if (missing := _at(hard, raises, start) - used - rate.per_s * (start - now)) > 0:
            if rate.per_s <= 0:
                continue
            reached = start + missing / rate.per_s
        if reached < end:
            return Forecast(outcome=Outcome.EXHAUSTS, at=reached)
    return Forecast(outcome=Outcome.NOT_BEFORE_RESET)


def _spans(raises: Sequence[Raise], now: float, until: float) -> list[tuple[float, float]]:
    """[now, until) cut where a raise starts or ends."""
    edges = sorted({edge for one in raises for edge in (one.starts_at, one.expires_at) if now < edge < until})
    return list(zip([now, *edges], [*edges, until], strict=True))


def _at(hard: int, raises: Sequence[Raise], at: float) -> int:
    return hard + sum(one.amount for one in raises if one.starts_at <= at < one.expires_at)
