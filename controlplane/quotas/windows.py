"""Calendar windows of a time zone: the day or month that holds an instant, and the one after it.

Layer: service. Pure: computed from the instant, never polled, so that a tick nobody heard changes nothing (F9).
Instants are Unix seconds; windows are half-open, [start, end), and one ends where the next begins.

A day starts when the zone's clocks first reach its midnight. Where they jump over midnight that is the jump itself;
where they are set back over it, the hour that repeats belongs to the day already begun. A date that a zone left out has
no window. The zone's rules are those of the machine's time zone database.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec

_DAY = timedelta(days=1)


class UnknownZoneError(ValueError):
    """No time zone has this name."""


class Calendar(enum.StrEnum):
    """How long a calendar window is."""

    DAY = "day"
    MONTH = "month"


class Windows(msgspec.Struct, frozen=True):
    """The window that holds an instant, [start, end), and the next one, [end, next_end), in whole Unix seconds."""

    start: int
    end: int
    next_end: int


def zone_of(name: str) -> ZoneInfo:
    """The IANA time zone `name`. Raises UnknownZoneError."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # what zoneinfo raises for a name, a path and a folder
        raise UnknownZoneError(f"there is no time zone {name[:64]!r}") from None


def windows(zone: str, calendar: Calendar, at: float) -> Windows:
    """The day or month of `zone` that holds `at`, an instant of the years 2 to 9998. Raises UnknownZoneError."""
    rules = zone_of(zone)
    step = _next_day if calendar is Calendar.DAY else _next_month
    local = datetime.fromtimestamp(at, rules).date()
    first = local - _DAY if calendar is Calendar.DAY else _month_before(local)
    start, first = _start(rules, first), step(first)
    while (end := _start(rules, first)) <= at:
        start, first = end, step(first)
    return Windows(start, end, _after(rules, step(first), end, step))


def day(zone: str, at: float) -> Windows:
    """The calendar day that holds `at`. Raises UnknownZoneError."""
    return windows(zone, Calendar.DAY, at)


def month(zone: str, at: float) -> Windows:
    """The calendar month that holds `at`. Raises UnknownZoneError."""
    return windows(zone, Calendar.MONTH, at)


def month_of(zone: str, year: int, number: int) -> tuple[int, int]:
    """[start, end) of the month `number` (1 to 12) of `year`, in Unix seconds. Raises UnknownZoneError."""
    rules, first = zone_of(zone), date(year, number, 1)
    return _start(rules, first), _start(rules, _next_month(first))


def _after(rules: ZoneInfo, first: date, start: int, step: Callable[[date], date]) -> int:
    """The end of the window that begins at `start`; a date that the zone left out ends where it would begin."""
    while (end := _start(rules, first)) <= start:
        first = step(first)
    return end


def _start(rules: ZoneInfo, first: date) -> int:
    """The first instant at which clocks show the midnight of `first` or later."""
    midnight = datetime(first.year, first.month, first.day)
    with_old = int(midnight.replace(tzinfo=rules, fold=0).timestamp())
    with_new = int(midnight.replace(tzinfo=rules, fold=1).timestamp())
    if with_new >= with_old:  # midnight exists: once, or twice and the first counts
        return with_old
    low, high = with_new, with_old  # clocks jump over midnight, somewhere in (low, high]
    while high - low > 1:
        middle = (low + high) // 2
        if datetime.fromtimestamp(middle, rules).replace(tzinfo=None) >= midnight:
            high = middle
        else:
            low = middle
    return high


def _next_day(first: date) -> date:
    return first + _DAY


def _next_month(first: date) -> date:
    return date(first.year + first.month // 12, first.month % 12 + 1, 1)


def _month_before(local: date) -> date:
    return (local.replace(day=1) - _DAY).replace(day=1)
