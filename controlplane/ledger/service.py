"""The usage ledger: every attempt once, and the sums every page and bill reads.

Layer: service. Decides; the caller's transaction commits. Nothing is ever changed or estimated here: a record is
stored as its producer counted it, or kept aside with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from msgspec import structs
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.ledger import partitions, repository
from controlplane.ledger.costing import CostFunction, cost, cut, price_of, price_sum
from controlplane.ledger.partitions import Changed
from controlplane.ledger.retention import CLAIMS_KEPT_S, DAYS_AHEAD, DAYS_KEPT
from controlplane.ledger.schemas import (
    RefusedRecord,
    SumDifference,
    UsageDimension,
    UsageLine,
    UsageSum,
    UsageTotal,
)
from controlplane.ledger.spans import Segment
from controlplane.ledger.sums import MOST_SEGMENTS, Whose, sums, usage_sum
from controlplane.paging import LARGEST, Cursor, Page, decode, page
from controlplane.quotas.schemas import Price
from controlplane.tenants import service as tenants
from dataplane.protocol import UsageRecord, encode

LONGEST_SPAN = timedelta(days=400)
"""Longest span of one total."""
MOST_TOTALS = 10_000
"""Rows of one total at most; more is refused, because a cut-off sum would not agree with the others."""
MOST_PRICED = 1_000_000
"""Pools times pieces of time: no deployment has so many."""
MOST_DIFFERENCES = 100


async def record(session: AsyncSession, records: Sequence[UsageRecord]) -> list[UsageRecord]:
    """Store the attempts not stored yet and return them; all of `records` may be acknowledged after the commit.

    The first record of an attempt wins: repeats, also within `records` and from elsewhere, change nothing, whatever
    they say. Call it at most once in a transaction: its locks are taken in an order that only holds within one call.
    """
    first: dict[str, UsageRecord] = {}
    for one in records:
        first.setdefault(one.attempt_id, one)
    if not first:
        return []
    fresh = await repository.insert_records(session, list(first.values()))
    return [one for attempt, one in first.items() if attempt in fresh]


async def set_aside(session: AsyncSession, refused: Sequence[tuple[UsageRecord, str]]) -> None:
    """Keep records that no bill could carry, with the reason; they are acknowledged but count nowhere."""
    await set_aside_raw(
        session, [RefusedRecord(sender=one.replica, packed=encode(one), reason=reason) for one, reason in refused]
    )


async def set_aside_raw(session: AsyncSession, refused: Sequence[RefusedRecord]) -> None:
    """Keep bytes that are perhaps no record at all, each once."""
    if refused:
        await repository.insert_refused(session, refused)


async def usage_totals(
    session: AsyncSession, *, by: UsageDimension, since: datetime, until: datetime, tenant: str | None = None
) -> list[UsageTotal]:
    """Usage of the attempts that finished in [since, until) by one dimension, most tokens first; the sums agree (F8).

    Raises InvalidRequestError when the span is empty, longer than `LONGEST_SPAN` or without time zone, and when there
    are more than `MOST_TOTALS` rows.
    """
    require_span(since, until)
    rows = await sums(session, [Segment(since, until)], by=[by], whose=Whose(tenant=tenant), most=MOST_TOTALS + 1)
    if len(rows) > MOST_TOTALS:
        raise InvalidRequestError(
            f"there are more than {MOST_TOTALS} rows by {by}: ask for a shorter span or one tenant", param="by"
        )
    return [UsageTotal(key=row.keys[0], **structs.asdict(usage_sum([row]))) for row in rows]


def require_span(since: datetime, until: datetime) -> None:
    """Raises InvalidRequestError when the span is empty, longer than `LONGEST_SPAN` or without time zone."""
    _require_zones(since, until)
    if not since < until <= since + LONGEST_SPAN:
        raise InvalidRequestError(
            f"a span ends after it starts and is at most {LONGEST_SPAN.days} days long", param="since"
        )


async def sum_since(
    session: AsyncSession,
    *,
    tenant: str,
    project: str | None = None,
    key_identity: str | None = None,
    model: str | None = None,
    since: datetime,
    until: datetime | None = None,
) -> UsageSum:
    """What a tenant (slug), or one of its projects (slug) or keys (identity, over all rotations), used of a model or of
    any, in attempts that finished in [since, until). Exact; at most two queries, whose cost does not grow with the
    ledger but with the rows of the two partial days at the ends.
    """
    whose = await _whose(session, tenant, project, key_identity, model)
    return usage_sum(await sums(session, [_segment(since, until)], by=[], whose=whose, most=1))


async def spent_since(
    session: AsyncSession,
    *,
    tenant: str,
    prices: Sequence[Price],
    project: str | None = None,
    key_identity: str | None = None,
    model: str | None = None,
    since: datetime,
    until: datetime | None = None,
    formula: CostFunction = cost,
) -> int:
    """Like `sum_since`, in whole micro-units: each attempt at the price in force when it finished, none without one."""
    whose = await _whose(session, tenant, project, key_identity, model)
    spent = 0
    pieces = cut(_segment(since, until), prices)
    for begin in range(0, len(pieces), MOST_SEGMENTS):
        some = pieces[begin : begin + MOST_SEGMENTS]
        for row in await sums(session, some, by=[UsageDimension.POOL], whose=whose, most=MOST_PRICED):
            price = price_of(prices, row.keys[0], some[row.segment])
            if price is not None:
                spent += price_sum(row, price, formula)
    return spent


async def check_sums(session: AsyncSession, first: date, end: date) -> list[SumDifference]:
    """Where the daily sums of days in [first, end) are not those of the ledger's rows, to the token; empty is right."""
    return await repository.differences(session, first, end, MOST_DIFFERENCES)


async def usage_page(
    session: AsyncSession,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    tenant: str | None = None,
    after: str | None = None,
    limit: int = 50,
) -> Page[UsageLine]:
    """Attempts that finished in [since, until), newest first, in one query that costs the same at any depth (F31).

    Raises InvalidRequestError for a span that is empty or without time zone and for a cursor that is not one of ours.
    """
    _require_zones(since, until)
    if since is not None and until is not None and since >= until:
        raise InvalidRequestError("a span ends after it starts", param="since")
    if not 1 <= limit <= LARGEST:
        raise InvalidRequestError(f"limit must lie between 1 and {LARGEST}", param="limit")
    rows = await repository.lines(
        session, since=since, until=until, tenant=tenant, after=decode(after), limit=limit + 1
    )
    return page(rows, limit, lambda row: row, lambda row: Cursor(row.finished_at, row.attempt_id))


async def rows_after(
    session: AsyncSession,
    *,
    since: datetime,
    until: datetime,
    tenant: str | None,
    last: UsageLine | None,
    limit: int,
) -> list[UsageLine]:
    """At most `limit` attempts that finished in [since, until), oldest first, those after `last`. One query."""
    after = None if last is None else Cursor(last.finished_at, last.attempt_id)
    return await repository.lines(
        session, since=since, until=until, tenant=tenant, after=after, limit=limit, oldest_first=True
    )


async def estimated_rows(session: AsyncSession) -> int:
    """About how many rows the ledger has."""
    return await repository.estimated_rows(session)


async def forget_refused(session: AsyncSession, *, older_than_s: float, limit: int) -> int:
    """Delete at most `limit` old records that were set aside; returns how many went. The ledger itself stays."""
    return await repository.delete_refused(session, older_than_s, limit)


async def forget_claims(session: AsyncSession, *, limit: int) -> int:
    """Delete at most `limit` claims that no record can come after any more; returns how many went."""
    return await repository.delete_claims(session, CLAIMS_KEPT_S, limit)


async def keep_partitions(session: AsyncSession, now: float, *, most: int) -> Changed | None:
    """Make and drop at most `most` partitions each; None when another transaction is at it."""
    if not await partitions.try_lock(session):
        return None
    today = datetime.fromtimestamp(now, UTC).date()
    return await partitions.keep(session, today=today, ahead=DAYS_AHEAD, kept=DAYS_KEPT, most=most)


async def _whose(
    session: AsyncSession, tenant: str, project: str | None, key_identity: str | None, model: str | None
) -> Whose:
    key_ids = None if key_identity is None else await tenants.key_ids_of(session, key_identity)
    return Whose(tenant=tenant, project=project, key_ids=key_ids, model=model)


def _segment(since: datetime, until: datetime | None) -> Segment:
    _require_zones(since, until)
    if until is not None and until < since:
        raise InvalidRequestError("a span ends after it starts", param="since")
    return Segment(since, until)


def _require_zones(since: datetime | None, until: datetime | None) -> None:
    for name, moment in (("since", since), ("until", until)):
        if moment is not None and moment.tzinfo is None:
            raise InvalidRequestError("a span's ends name their time zone", param=name)
