"""The usage ledger: every attempt once, and the sums every page and bill reads.

Layer: service. Decides; the caller's transaction commits. Nothing is ever changed or estimated here: a record is
stored as its producer counted it, or kept aside with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.ledger import repository
from controlplane.ledger.schemas import UsageDimension, UsageLine, UsageTotal
from controlplane.paging import LARGEST, Cursor, Page, decode, page
from dataplane.protocol import UsageRecord

LONGEST_SPAN = timedelta(days=400)
"""Longest span of one total."""


async def record(session: AsyncSession, records: Sequence[UsageRecord]) -> list[UsageRecord]:
    """Store the attempts not stored yet and return them; all of `records` may be acknowledged after the commit.

    The first record of an attempt wins: repeats, also within `records`, change nothing.
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
    if refused:
        await repository.insert_refused(session, refused)


async def usage_totals(
    session: AsyncSession, *, by: UsageDimension, since: datetime, until: datetime, tenant: str | None = None
) -> list[UsageTotal]:
    """Usage of the attempts that finished in [since, until) by tenant, model or key; the sums agree (F8).

    Raises InvalidRequestError when the span is empty, longer than `LONGEST_SPAN` or without time zone.
    """
    _require_zones(since, until)
    if not since < until <= since + LONGEST_SPAN:
        raise InvalidRequestError(
            f"a span ends after it starts and is at most {LONGEST_SPAN.days} days long", param="since"
        )
    return await repository.totals(session, by=by, since=since, until=until, tenant=tenant)


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
    rows = await repository.lines(session, since=since, until=until, tenant=tenant, after=decode(after), limit=limit)
    return page(rows, limit, lambda row: row, lambda row: Cursor(row.finished_at, row.attempt_id))


async def estimated_rows(session: AsyncSession) -> int:
    """About how many rows the ledger has."""
    return await repository.estimated_rows(session)


async def forget_refused(session: AsyncSession, *, older_than_s: float, limit: int) -> int:
    """Delete at most `limit` old records that were set aside; returns how many went. The ledger itself stays."""
    return await repository.delete_refused(session, older_than_s, limit)


def _require_zones(since: datetime | None, until: datetime | None) -> None:
    for name, moment in (("since", since), ("until", until)):
        if moment is not None and moment.tzinfo is None:
            raise InvalidRequestError("a span's ends name their time zone", param=name)
