"""A tenant's statement of a calendar month: lines, and sums of them that agree.

Layer: service. Reads the ledger in one query (one more per 64 changes of price within the month). What is rounded is
the cost of one key, project, model, pool and basis at one price; every other cost is a sum of those, so all sums agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from msgspec import structs
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.ledger.costing import CostFunction, cost, cut, price_of, price_sum
from controlplane.ledger.retention import DAYS_KEPT
from controlplane.ledger.schemas import Statement, StatementLine, StatementPart, UsageDimension
from controlplane.ledger.spans import Segment, month_of
from controlplane.ledger.sums import MOST_SEGMENTS, Summed, Whose, sums, usage_sum
from controlplane.quotas.schemas import Price
from controlplane.tenants import service as tenants

MOST_LINES = 10_000
_BY = (
    UsageDimension.PROJECT,
    UsageDimension.KEY,
    UsageDimension.MODEL,
    UsageDimension.POOL,
    UsageDimension.BASIS,
)

PriceSource = Callable[[AsyncSession], Awaitable[Sequence[Price]]]
"""Where the routes read all prices, past ones too."""


async def no_prices(_: AsyncSession) -> Sequence[Price]:
    """Of a deployment that has none: everything is unpriced."""
    return ()


class _Priced(NamedTuple):
    """One sum with its cost; `unpriced` are its attempts when no price was in force."""

    summed: Summed
    cost: int
    unpriced: int


async def statement(
    session: AsyncSession,
    slug: str,
    month: str,
    *,
    now: datetime,
    prices: Sequence[Price] = (),
    formula: CostFunction = cost,
) -> Statement:
    """The statement of the tenant `slug` for the month "yyyy-mm" of its time zone; of the running month, so far.

    Raises NotFoundError, and InvalidRequestError for a month that is none or no longer kept, and for more lines than
    MOST_LINES.
    """
    time_zone = await tenants.time_zone_of(session, slug)
    span = month_of(month, ZoneInfo(time_zone))
    assert span.until is not None
    if span.since < now.astimezone(UTC) - timedelta(days=DAYS_KEPT):
        raise InvalidRequestError(f"the ledger keeps {DAYS_KEPT} days; this month began before", param="month")
    priced = await _priced(session, slug, cut(span, prices), prices, formula)
    by = {one: _parts(priced, number) for number, one in enumerate(_BY)}
    return Statement(
        tenant=slug,
        month=month,
        time_zone=time_zone,
        since=span.since,
        until=span.until,
        total=StatementPart(key=slug, **_total(priced)),
        lines=_lines(priced),
        by_project=by[UsageDimension.PROJECT],
        by_key=by[UsageDimension.KEY],
        by_model=by[UsageDimension.MODEL],
        by_pool=by[UsageDimension.POOL],
        by_basis=by[UsageDimension.BASIS],
    )


async def _priced(
    session: AsyncSession, slug: str, pieces: Sequence[Segment], prices: Sequence[Price], formula: CostFunction
) -> list[_Priced]:
    found: list[_Priced] = []
    for begin in range(0, len(pieces), MOST_SEGMENTS):
        some = pieces[begin : begin + MOST_SEGMENTS]
        rows = await sums(session, some, by=_BY, whose=Whose(tenant=slug), most=MOST_LINES + 1 - len(found))
        for row in rows:
            price = price_of(prices, row.keys[_BY.index(UsageDimension.POOL)], some[row.segment])
            spent = 0 if price is None else price_sum(row, price, formula)
            found.append(_Priced(row, spent, row.attempts if price is None else 0))
        if len(found) > MOST_LINES:
            raise InvalidRequestError(
                f"a statement has at most {MOST_LINES} lines; export the month's rows instead", param="month"
            )
    return found


def _total(rows: Sequence[_Priced]) -> dict[str, Any]:
    """Fields of a part or line."""
    used = structs.asdict(usage_sum([row.summed for row in rows]))
    return {**used, "cost": sum(row.cost for row in rows), "unpriced_attempts": sum(row.unpriced for row in rows)}


def _parts(rows: Iterable[_Priced], dimension: int) -> list[StatementPart]:
    groups: dict[str, list[_Priced]] = {}
    for row in rows:
        groups.setdefault(row.summed.keys[dimension], []).append(row)
    return [StatementPart(key=key, **_total(groups[key])) for key in sorted(groups)]


def _lines(rows: Iterable[_Priced]) -> list[StatementLine]:
    groups: dict[tuple[str, ...], list[_Priced]] = {}
    for row in rows:
        groups.setdefault(row.summed.keys[:4], []).append(row)
    return [
        StatementLine(project=keys[0], key_id=keys[1], model=keys[2], pool=keys[3], **_total(groups[keys]))
        for keys in sorted(groups)
    ]
