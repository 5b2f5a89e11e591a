"""Summing the ledger over any span: whole days from the daily sums, the rest from rows.

Layer: service. SQL only. One statement, so one snapshot: what a writer has committed is in it once, as a sum or as a
row. Its cost grows with the days and with the rows of two partial days, not with the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Numeric, Select, String, cast, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.ledger.models import UsageDay, UsageEntry
from controlplane.ledger.schemas import UsageDimension, UsageSum
from controlplane.ledger.spans import Segment, split

COUNTS = ("attempts", "prompt_tokens", "cached_tokens", "output_tokens")
SECONDS = ("kv_block_seconds", "device_seconds")
MOST_SEGMENTS = 64
"""Segments one statement takes: each adds up to three branches to it."""

_COLUMN = {
    UsageDimension.TENANT: "tenant",
    UsageDimension.PROJECT: "project",
    UsageDimension.KEY: "key_id",
    UsageDimension.MODEL: "model",
    UsageDimension.POOL: "pool",
    UsageDimension.BASIS: "basis",
}


class Summed(NamedTuple):
    """Sums of one combination of dimensions within the segment of that number. `kv_block_seconds` and `device_seconds`
    are exact to the microsecond of each attempt.
    """

    segment: int
    keys: tuple[str, ...]
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_block_seconds: Decimal
    device_seconds: Decimal

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Whose(NamedTuple):
    """Whose attempts are summed; None is anybody's. `key_ids` are those of one key's chain of rotations."""

    tenant: str | None = None
    project: str | None = None
    key_ids: Sequence[str] | None = None
    model: str | None = None

    def conditions(self, table: type[UsageDay | UsageEntry]) -> list[ColumnElement[bool]]:
        found = [
            getattr(table, name) == value
            for name, value in (("tenant", self.tenant), ("project", self.project), ("model", self.model))
            if value is not None
        ]
        if self.key_ids is not None:
            found.append(table.key_id.in_(self.key_ids))
        return found


async def sums(
    session: AsyncSession, segments: Sequence[Segment], *, by: Sequence[UsageDimension], whose: Whose, most: int
) -> list[Summed]:
    """At most `most` sums over each of `segments` (at most MOST_SEGMENTS) by the dimensions `by`, most tokens first."""
    statement = query(segments, by=by, whose=whose)
    if statement is None:
        return []
    rows = await session.execute(statement.limit(most))
    width = len(by)
    return [
        Summed(row[0], tuple(row[1 : 1 + width]), *map(int, row[1 + width : -2]), *row[-2:])  # type: ignore[arg-type]
        for row in rows
    ]


def query(
    segments: Sequence[Segment], *, by: Sequence[UsageDimension], whose: Whose
) -> Select[*tuple[Any, ...]] | None:
    """The statement of `sums`; None when the segments are empty."""
    assert len(segments) <= MOST_SEGMENTS
    branches = [branch for number, one in enumerate(segments) for branch in _branches(number, one, by, whose)]
    if not branches:
        return None
    parts = union_all(*branches).subquery()
    keys = [parts.c.segment, *(parts.c[one.value] for one in by)]
    tokens = func.sum(parts.c.prompt_tokens + parts.c.output_tokens)
    return (
        select(*keys, *(func.sum(parts.c[name]) for name in (*COUNTS, *SECONDS)))
        .group_by(*keys)
        .order_by(tokens.desc(), *keys)
    )


def _branches(
    number: int, segment: Segment, by: Sequence[UsageDimension], whose: Whose
) -> list[Select[*tuple[Any, ...]]]:
    parts = split(segment)
    found: list[Select[*tuple[Any, ...]]] = []
    if parts.first < parts.end:
        found.append(
            select(
                literal(number).label("segment"),
                *(_dimension(UsageDay, one) for one in by),
                *(getattr(UsageDay, name).label(name) for name in (*COUNTS, *SECONDS)),
            ).where(*_days(parts.first, parts.end), *whose.conditions(UsageDay))
        )
    found += [_rows(number, edge, by, whose) for edge in parts.edges]
    return found


def _days(first: date, end: date) -> list[ColumnElement[bool]]:
    return [UsageDay.day >= first, *([UsageDay.day < end] if end < date.max else [])]


def _rows(
    number: int, edge: tuple[datetime, datetime], by: Sequence[UsageDimension], whose: Whose
) -> Select[*tuple[Any, ...]]:
    measures: Mapping[str, ColumnElement[Any]] = {
        "attempts": literal(1),
        **{name: getattr(UsageEntry, name) for name in COUNTS[1:]},
        **{name: func.round(cast(getattr(UsageEntry, name), Numeric), 6) for name in SECONDS},
    }
    return select(
        literal(number).label("segment"),
        *(_dimension(UsageEntry, one) for one in by),
        *(measure.label(name) for name, measure in measures.items()),
    ).where(UsageEntry.finished_at >= edge[0], UsageEntry.finished_at < edge[1], *whose.conditions(UsageEntry))


def _dimension(table: type[UsageDay | UsageEntry], dimension: UsageDimension) -> ColumnElement[str]:
    if dimension is not UsageDimension.DAY:
        column: ColumnElement[str] = getattr(table, _COLUMN[dimension]).label(dimension.value)
        return column
    day = UsageDay.day if table is UsageDay else func.timezone("UTC", UsageEntry.finished_at)
    return cast(func.to_char(day, "YYYY-MM-DD"), String).label(dimension.value)


def usage_sum(rows: Sequence[Summed]) -> UsageSum:
    """The sum of sums."""
    prompt, cached = sum(row.prompt_tokens for row in rows), sum(row.cached_tokens for row in rows)
    return UsageSum(
        attempts=sum(row.attempts for row in rows),
        prompt_tokens=prompt,
        cached_tokens=cached,
        uncached_tokens=prompt - cached,
        output_tokens=sum(row.output_tokens for row in rows),
        kv_block_seconds=float(sum((row.kv_block_seconds for row in rows), Decimal())),
        device_seconds=float(sum((row.device_seconds for row in rows), Decimal())),
    )
