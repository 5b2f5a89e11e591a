"""Cutting a span of time into whole days (UTC), which are summed already, and the rest, which is summed from rows.

Layer: service. Pure. Also the calendar months of a time zone.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from controlplane.errors import InvalidRequestError
from controlplane.quotas import windows

_DAY = timedelta(days=1)
_MONTH = re.compile(r"(\d{4})-(\d{2})")


class Segment(NamedTuple):
    """[since, until); `until` None is without end. Both name their time zone."""

    since: datetime
    until: datetime | None


class Parts(NamedTuple):
    """A segment: the whole days [first, end), empty when equal, and at most two spans of less than a day each."""

    first: date
    end: date
    edges: tuple[tuple[datetime, datetime], ...]


def start_of(day: date) -> datetime:
    """The day's first instant (UTC)."""
    return datetime.combine(day, time(), tzinfo=UTC)


def split(segment: Segment) -> Parts:
    """Every instant of `segment` lies in exactly one part, and no other does."""
    since = segment.since.astimezone(UTC)
    first = since.date() if since == start_of(since.date()) else since.date() + _DAY
    if segment.until is None:
        edges = [(since, start_of(first))]
        end = date.max
    else:
        until = segment.until.astimezone(UTC)
        end = until.date()
        if end < first:  # within one day
            return Parts(first, first, ((since, until),) if since < until else ())
        edges = [(since, start_of(first)), (start_of(end), until)]
    return Parts(first, end, tuple(edge for edge in edges if edge[0] < edge[1]))


def month_of(text: str, time_zone: ZoneInfo) -> Segment:
    """The calendar month "yyyy-mm" in `time_zone`, as limits have it. Raises InvalidRequestError for what is none."""
    found = _MONTH.fullmatch(text)
    if found is None:
        raise InvalidRequestError("a month has the form 2026-11", param="month")
    if not 1 <= int(found[2]) <= 12 or not 2000 <= int(found[1]) <= 9998:
        raise InvalidRequestError(f"there is no month {text}: they go from 2000-01 to 9998-12", param="month")
    window = windows.month_of(time_zone.key, int(found[1]), int(found[2]))
    return Segment(*(datetime.fromtimestamp(at, UTC) for at in window))
