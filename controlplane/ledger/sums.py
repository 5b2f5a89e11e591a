"""Summing the ledger over any span: whole days from the daily sums, the rest from rows.

Layer: service. SQL only. One statement, so one snapshot: what a writer has committed is in it once, as a sum or as a
row. Its cost grows with the days and with the rows of two partial days, not with the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Numeric, Select, String, case, cast, exists, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.ledger.models import ClaimedAttempt, HeldUsage, UsageDay, UsageEntry
from controlplane.ledger.schemas import UsageDimension, UsageSum
from controlplane.ledger.spans import Segment, split

COUNTS = ("attempts", "prompt_tokens", "cached_tokens", "output_tokens", "cost", "unpriced_attempts")
SECONDS = ("kv_block_seconds", "device_seconds")

Table = UsageDay | UsageEntry | HeldUsage

_COLUMN = {
    UsageDimension.TENANT: "tenant",
    UsageDimension.PROJECT: "project",
    UsageDimension.KEY: "key_id",
    UsageDimension.MODEL: "model",
    UsageDimension.POOL: "pool",
    UsageDimension.BASIS: "basis",
}


class Summed(NamedTuple):
    """Sums of one combination of dimensions. `kv_block_seconds` and `device_seconds` are exact to the microsecond of
    each attempt, `cost` is in micro-units.
    """

    keys: tuple[str, ...]
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int
    unpriced_attempts: int
    kv_block_seconds: Decimal
    device_seconds: Decimal


class Whose(NamedTuple):
    """Whose attempts are summed; None is anybody's. `key_ids` are those of one key's chain of rotations."""

    tenant: str | None = None
    project: str | None = None
    key_ids: Sequence[str] | None = None
    model: str | None = None

    def conditions(self, table: type[Table]) -> list[ColumnElement[bool]]:
        found = [
            getattr(table, name) == value
            for name, value in (("tenant", self.tenant), ("project", self.project), ("model", self.model))
            if value is not None
        ]
        if self.key_ids is not None:
            found.append(table.key_id.in_(self.key_ids))
        return found


async def sums(
    session: AsyncSession,
    segment: Segment,
    *,
    by: Sequence[UsageDimension],
    whose: Whose,
    most: int,
    with_held: bool = False,
) -> list[Summed]:
    """At most `most` sums over `segment` by the dimensions `by`, most tokens first. `with_held` takes in what gateways
    counted and the ledger does not have yet.
    """
    statement = query(segment, by=by, whose=whose, with_held=with_held)
    if statement is None:
        return []
    rows = await session.execute(statement.limit(most))
    width = len(by)
    return [Summed(tuple(row[:width]), *map(int, row[width:-2]), *row[-2:]) for row in rows]  # type: ignore[arg-type]


def query(
    segment: Segment, *, by: Sequence[UsageDimension], whose: Whose, with_held: bool = False
) -> Select[*tuple[Any, ...]] | None:
    """The statement of `sums`; None when the segment is empty."""
    branches = _branches(segment, by, whose)
    if not branches:
        return None
    if with_held:
        claimed = exists().where(ClaimedAttempt.attempt_id == HeldUsage.attempt_id)
        branches.append(_rows(HeldUsage, (segment.since, segment.until), by, whose).where(~claimed))
    parts = union_all(*branches).subquery()
    keys = [parts.c[one.value] for one in by]
    tokens = func.sum(parts.c.prompt_tokens + parts.c.output_tokens)
    found = select(*keys, *(func.sum(parts.c[name]) for name in (*COUNTS, *SECONDS)))
    if not by:  # one row, also of nothing
        return found.having(func.count() > 0)
    return found.group_by(*keys).order_by(tokens.desc(), *keys)


def _branches(segment: Segment, by: Sequence[UsageDimension], whose: Whose) -> list[Select[*tuple[Any, ...]]]:
    parts = split(segment)
    found: list[Select[*tuple[Any, ...]]] = []
    if parts.first < parts.end:
        found.append(
            select(
                *(_dimension(UsageDay, one) for one in by),
                *(getattr(UsageDay, name).label(name) for name in (*COUNTS, *SECONDS)),
            ).where(*_days(parts.first, parts.end), *whose.conditions(UsageDay))
        )
    found += [_rows(UsageEntry, edge, by, whose) for edge in parts.edges]
    return found


def _days(first: date, end: date) -> list[ColumnElement[bool]]:
    return [UsageDay.day >= first, *([UsageDay.day < end] if end < date.max else [])]


def _rows(
    table: type[UsageEntry | HeldUsage],
    span: tuple[datetime, datetime | None],
    by: Sequence[UsageDimension],
    whose: Whose,
) -> Select[*tuple[Any, ...]]:
    since, until = span
    measures: Mapping[str, ColumnElement[Any]] = {
        "attempts": literal(1),
        **{name: getattr(table, name) for name in COUNTS[1:4]},
        "cost": func.coalesce(table.cost, 0),
        "unpriced_attempts": case((table.cost.is_(None), 1), else_=0),
        **{name: func.round(cast(getattr(table, name), Numeric), 6) for name in SECONDS},
    }
    ends = [table.finished_at < until] if until is not None else []
    return select(
        *(_dimension(table, one) for one in by), *(measure.label(name) for name, measure in measures.items())
    ).where(table.finished_at >= since, *ends, *whose.conditions(table))


def _dimension(table: type[Table], dimension: UsageDimension) -> ColumnElement[str]:
    if dimension is not UsageDimension.DAY:
        column: ColumnElement[str] = getattr(table, _COLUMN[dimension]).label(dimension.value)
        return column
    day = table.day if issubclass(table, UsageDay) else func.timezone("UTC", table.finished_at)
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
        cost=sum(row.cost for row in rows),
        unpriced_attempts=sum(row.unpriced_attempts for row in rows),
    )
