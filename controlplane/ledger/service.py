"""The usage ledger: every attempt once, and the sums every page and bill reads.

Layer: service. Decides; the caller's transaction commits. Nothing is ever changed or estimated here: a record is
stored as its producer counted it, or kept aside with a reason. What the replica counted goes before what its gateway
did, so the gateway's record is held for a while (ADR 0014).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from msgspec import structs
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.fleet import service as fleet
from controlplane.ledger import partitions, repository
from controlplane.ledger.costing import PriceList
from controlplane.ledger.partitions import Changed
from controlplane.ledger.repository import Costed, HeldNow
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
from controlplane.ledger.sums import Summed, Whose, sums, usage_sum
from controlplane.paging import Cursor, Page, checked, decode, page
from controlplane.quotas.price_service import prices_between
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import PROBE_TENANT
from dataplane.protocol import UsageRecord, encode

MARGIN_S = 5.0
"""A replica has told of an attempt within this long after its gateway's count came, or it never will."""
SILENT_S = 600.0
"""A replica that has told nothing for this long is not waited for."""
SETTLED_AT_ONCE = 2_000
MOST_REPLICAS = 2_000
LATE = "the gateway's count is in the ledger: the replica had told nothing for too long"
LONGEST_SPAN = timedelta(days=400)
"""Longest span of one total."""
MOST_TOTALS = 10_000
"""Rows of one total at most; more is refused, because a cut-off sum would not agree with the others."""
MOST_DIFFERENCES = 100


class Taken(NamedTuple):
    """What became of gateways' counts: attempts stored at once, number held, number that was stored or held before."""

    stored: list[UsageRecord]
    held: int
    known: int


class Recorded(NamedTuple):
    """What became of replicas' counts: attempts stored, and how many were newly set aside for coming too late."""

    stored: list[UsageRecord]
    late: int


async def record(session: AsyncSession, records: Sequence[UsageRecord]) -> Recorded:
    """Store what replicas counted, of attempts not stored yet, with what each cost. All of `records` may be
    acknowledged after the commit.

    The first record of an attempt wins: repeats, also within `records`, change nothing, whatever they say. What a
    gateway counted of the attempt and is still held is dropped; where it has become the row, because the replica was
    silent for too long, the replica's record is set aside. Call it at most once in a transaction: its locks are taken
    in an order that only holds within one call.
    """
    first = _first(records)
    fresh = await _store(session, await _costed(session, first), by_gateway=False)
    late = await repository.stored_by_gateway(session, [one for one in first if one not in fresh]) if first else set()
    kept = await set_aside(session, [(first[attempt], LATE) for attempt in sorted(late)])
    return Recorded([one for attempt, one in first.items() if attempt in fresh], kept)


async def record_from_gateways(session: AsyncSession, records: Sequence[UsageRecord]) -> Taken:
    """Take what gateways counted. Of an attempt whose replica tells its own count it is held until that comes, or can
    come no more (`settle_held`); of others it is stored at once. Call it at most once in a transaction.
    """
    first = _first(records)
    costed = await _costed(session, first)
    telling = await fleet.usage_told_until(session, sorted({one.replica for one in first.values()}))
    waits = [one for one in costed if one.record.replica in telling]
    fresh = await _store(session, [one for one in costed if one.record.replica not in telling], by_gateway=True)
    held = await repository.hold(session, waits) if waits else set()
    stored = [one for attempt, one in first.items() if attempt in fresh]
    return Taken(stored, len(held), len(records) - len(stored) - len(held))


async def settle_held(session: AsyncSession, now: float, *, limit: int = SETTLED_AT_ONCE) -> list[UsageRecord] | None:
    """Store at most `limit` of the held attempts whose replica will not tell its own count any more; returns those not
    stored before, None when another transaction is at it.

    That is when the replica has told everything up to `MARGIN_S` after the attempt was held and this one was not among
    it, or has said nothing for `SILENT_S`. Replicas that the fleet has forgotten say nothing.
    """
    if not await repository.try_settling(session):
        return None
    waiting = await repository.held_replicas(session, MOST_REPLICAS)
    told = await fleet.usage_told_until(session, sorted(waiting))
    before = {replica: max(told.get(replica, 0.0) - MARGIN_S, now - SILENT_S) for replica in waiting}
    due = await repository.due(session, before, limit)
    fresh = await _store(session, due, by_gateway=True)
    await repository.release(session, [one.record.attempt_id for one in due if one.record.attempt_id not in fresh])
    return [one.record for one in due if one.record.attempt_id in fresh]


async def held_now(session: AsyncSession) -> HeldNow:
    """What is held, and since when."""
    return await repository.held_now(session)


async def set_aside(session: AsyncSession, refused: Sequence[tuple[UsageRecord, str]]) -> int:
    """Keep records that no bill could carry, with the reason; they are acknowledged but count nowhere. Returns how many
    were not kept before: senders repeat what they have no word about.
    """
    return await set_aside_raw(
        session, [RefusedRecord(sender=one.replica, packed=encode(one), reason=reason) for one, reason in refused]
    )


async def set_aside_raw(session: AsyncSession, refused: Sequence[RefusedRecord]) -> int:
    """Keep bytes that are perhaps no record at all, each once. Returns how many were not kept before."""
    return await repository.insert_refused(session, refused) if refused else 0


async def usage_totals(
    session: AsyncSession, *, by: UsageDimension, since: datetime, until: datetime, tenant: str | None = None
) -> list[UsageTotal]:
    """Usage of the attempts that finished in [since, until) by one dimension, most tokens first; the sums agree (F8).
    What the probe tenant used is told in each of them. Projects of two tenants are two, whatever their slugs.

    Raises InvalidRequestError when the span is empty, longer than `LONGEST_SPAN` or without time zone, and when there
    are more than `MOST_TOTALS` rows.
    """
    require_span(since, until)
    span = Segment(since, until)
    canaries = await _canaries(session, span, by, tenant)
    rows = await sums(session, span, by=_keys(by), whose=Whose(tenant=tenant), most=MOST_TOTALS + 1)
    if len(rows) > MOST_TOTALS:
        raise InvalidRequestError(
            f"there are more than {MOST_TOTALS} rows by {by}: ask for a shorter span or one tenant", param="by"
        )
    return [_total(row, canaries.get(row.keys, UsageSum()), by) for row in rows]


def _keys(by: UsageDimension) -> list[UsageDimension]:
    """What tells one total from the next."""
    return [UsageDimension.TENANT, by] if by is UsageDimension.PROJECT else [by]


async def _canaries(
    session: AsyncSession, span: Segment, by: UsageDimension, tenant: str | None
) -> dict[tuple[str, ...], UsageSum]:
    """What the probe tenant used of each total. Asked before the totals, so that a part is never more than its whole;
    not at all where tenants are told apart.
    """
    if by is UsageDimension.TENANT or tenant not in (None, PROBE_TENANT):
        return {}
    rows = await sums(session, span, by=_keys(by), whose=Whose(tenant=PROBE_TENANT), most=MOST_TOTALS)
    return {row.keys: usage_sum([row]) for row in rows}


def _total(row: Summed, canaries: UsageSum, by: UsageDimension) -> UsageTotal:
    total = usage_sum([row])
    if by is UsageDimension.TENANT and row.keys[0] == PROBE_TENANT:
        canaries = total
    whose = row.keys[0] if by is UsageDimension.PROJECT else None
    return UsageTotal(key=row.keys[-1], tenant=whose, canaries=canaries, **structs.asdict(total))


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
    with_held: bool = False,
) -> UsageSum:
    """What a tenant (slug), or one of its projects (slug) or keys (identity, over all rotations), used of a model or of
    any, and what it cost, in attempts that finished in [since, until). Exact; at most two queries, whose cost does not
    grow with the ledger but with the rows of the two partial days at the ends.

    `with_held` also counts what gateways have counted and the ledger waits to hear from a replica: for limits, which
    must not forget it.
    """
    whose = await _whose(session, tenant, project, key_identity, model)
    return usage_sum(await sums(session, _segment(since, until), by=[], whose=whose, most=1, with_held=with_held))


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
    limit = checked(limit)
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


def _first(records: Sequence[UsageRecord]) -> dict[str, UsageRecord]:
    first: dict[str, UsageRecord] = {}
    for one in records:
        first.setdefault(one.attempt_id, one)
    return first


async def _costed(session: AsyncSession, records: Mapping[str, UsageRecord]) -> list[Costed]:
    """What each attempt cost at the price in force when its request arrived. One query."""
    if not records:
        return []
    arrivals = [one.started_at for one in records.values()]
    since, until = (datetime.fromtimestamp(at, UTC) for at in (min(arrivals), max(arrivals)))
    prices = PriceList(await prices_between(session, since, until + timedelta(seconds=1)))
    return [Costed(one, prices.cost(one)) for one in records.values()]


async def _store(session: AsyncSession, records: Sequence[Costed], *, by_gateway: bool) -> set[str]:
    return await repository.insert_records(session, records, by_gateway=by_gateway) if records else set()


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
