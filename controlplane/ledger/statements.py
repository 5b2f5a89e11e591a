"""A tenant's statement of a calendar month: lines, and sums of them that agree.

Layer: service. Reads the ledger's sums in one query. What is rounded is the cost of one attempt; every cost here is a
sum of those, so all of them agree with each other, with the exported rows and with what money limits have counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from msgspec import structs
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.ledger.retention import DAYS_KEPT
from controlplane.ledger.schemas import Statement, StatementLine, StatementPart, UsageDimension
from controlplane.ledger.spans import month_of
from controlplane.ledger.sums import Summed, Whose, sums, usage_sum
from controlplane.tenants import service as tenants

MOST_LINES = 10_000
_BY = (
    UsageDimension.PROJECT,
    UsageDimension.KEY,
    UsageDimension.MODEL,
    UsageDimension.POOL,
    UsageDimension.BASIS,
)


async def statement(session: AsyncSession, slug: str, month: str, *, now: datetime) -> Statement:
    """The statement of the tenant `slug` for the month "yyyy-mm" of its time zone; of the running month, so far.

    Raises NotFoundError, and InvalidRequestError for a month that is none or no longer kept, and for more lines than
    MOST_LINES.
    """
    time_zone = await tenants.time_zone_of(session, slug)
    span = month_of(month, ZoneInfo(time_zone))
    assert span.until is not None
    if span.since < now.astimezone(UTC) - timedelta(days=DAYS_KEPT):
        raise InvalidRequestError(f"the ledger keeps {DAYS_KEPT} days; this month began before", param="month")
    rows = await sums(session, span, by=_BY, whose=Whose(tenant=slug), most=MOST_LINES + 1)
    if len(rows) > MOST_LINES:
        raise InvalidRequestError(
            f"a statement has at most {MOST_LINES} lines; export the month's rows instead", param="month"
        )
    by = {one: _parts(rows, number) for number, one in enumerate(_BY)}
    return Statement(
        tenant=slug,
        month=month,
        time_zone=time_zone,
        since=span.since,
        until=span.until,
        total=StatementPart(key=slug, **structs.asdict(usage_sum(rows))),
        lines=_lines(rows),
        by_project=by[UsageDimension.PROJECT],
        by_key=by[UsageDimension.KEY],
        by_model=by[UsageDimension.MODEL],
        by_pool=by[UsageDimension.POOL],
        by_basis=by[UsageDimension.BASIS],
    )


def _parts(rows: Iterable[Summed], dimension: int) -> list[StatementPart]:
    groups: dict[str, list[Summed]] = {}
    for row in rows:
        groups.setdefault(row.keys[dimension], []).append(row)
    return [StatementPart(key=key, **structs.asdict(usage_sum(groups[key]))) for key in sorted(groups)]


def _lines(rows: Iterable[Summed]) -> list[StatementLine]:
    groups: dict[tuple[str, ...], list[Summed]] = {}
    for row in rows:
        groups.setdefault(row.keys[:4], []).append(row)
    return [
        StatementLine(
            project=keys[0], key_id=keys[1], model=keys[2], pool=keys[3], **structs.asdict(usage_sum(groups[keys]))
        )
        for keys in sorted(groups)
    ]
