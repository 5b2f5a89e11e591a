"""Lines of the Usage pages. Layer: service. Pure: sums of the ledger in, lines with text out; it never queries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from zoneinfo import ZoneInfo

from controlplane.ledger.schemas import UsageSum

MOST_ROWS = 100
"""Lines of one table; what lies beyond is summed into one more."""
REST = "All others"


class UsageRow(NamedTuple):
    """One line. `details` are further keys; `rest` marks the one that sums what was cut off, `probe` the tenant
    that canaries act as: nobody's own use.
    """

    key: str
    details: tuple[str, ...]
    attempts: int
    uncached: int
    cached: int
    output: int
    device_seconds: float
    cost: int
    unpriced: int
    rest: bool = False
    probe: bool = False


def rows_of(
    sums: Sequence[tuple[str, UsageSum]], *, details: Sequence[tuple[str, ...]] = (), most: int = MOST_ROWS
) -> list[UsageRow]:
    """Lines of `sums`, most tokens first, at most `most` and one for all others."""
    named = [_row(key, details[number] if details else (), one) for number, (key, one) in enumerate(sums)]
    named.sort(key=lambda row: (-(row.uncached + row.cached + row.output), row.key, row.details))
    shown, others = named[:most], named[most:]
    return [*shown, _rest(others)] if others else shown


def month_of_now(now: datetime, time_zone: str) -> str:
    """The calendar month that runs in `time_zone`."""
    return now.astimezone(ZoneInfo(time_zone)).strftime("%Y-%m")


def month_before(month: str) -> str:
    year, number = int(month[:4]), int(month[5:])
    return f"{year - 1:04d}-12" if number == 1 else f"{year:04d}-{number - 1:02d}"


def month_after(month: str) -> str:
    year, number = int(month[:4]), int(month[5:])
    return f"{year + 1:04d}-01" if number == 12 else f"{year:04d}-{number + 1:02d}"


def months_around(month: str, now: datetime, time_zone: str) -> tuple[str, str | None]:
    """The month before, and the one after unless it has not begun."""
    after = month_after(month)
    return month_before(month), after if after <= month_of_now(now, time_zone) else None


def _row(key: str, details: tuple[str, ...], one: UsageSum) -> UsageRow:
    return UsageRow(
        key=key,
        details=details,
        attempts=one.attempts,
        uncached=one.uncached_tokens,
        cached=one.cached_tokens,
        output=one.output_tokens,
        device_seconds=one.device_seconds,
        cost=one.cost,
        unpriced=one.unpriced_attempts,
    )


def _rest(rows: Sequence[UsageRow]) -> UsageRow:
    return UsageRow(
        key=f"{REST} ({len(rows):,})",
        details=(),
        attempts=sum(row.attempts for row in rows),
        uncached=sum(row.uncached for row in rows),
        cached=sum(row.cached for row in rows),
        output=sum(row.output for row in rows),
        device_seconds=sum(row.device_seconds for row in rows),
        cost=sum(row.cost for row in rows),
        unpriced=sum(row.unpriced for row in rows),
        rest=True,
    )
