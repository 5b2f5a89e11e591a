"""What tenants were refused: from gateways' reports to rows, and from rows to what a tenant may read of it.

Layer: service. Rows are per tenant, so no page of one can hold another's (F36); a row replaces an older one of its key
when its sequence is newer, so repeats never count twice. Counts are exact; of the requests themselves each window keeps
the last few of each reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.telemetry.models import RefusalWindow
from controlplane.telemetry.validation import RefusedError, check_refusals, check_start
from dataplane.protocol import WINDOW_SECONDS, GatewayReport, RefusedRequest, encode

KEPT_S = 86_400
"""As long as all rows of 10 s."""
BUCKETS = {300: 10, 3600: 60, 86_400: 3600}
"""Seconds that may be looked back over, and how finely."""
MOST_COUNTS = 2_000
MOST_LATEST = 20
_ROWS_OF_LATEST = 200


class RefusalKey(NamedTuple):
    """The primary key of a row."""

    tenant: str
    start: int
    code: str
    quota_id: str
    instance: str
    boot_epoch: int


class RefusalRow(NamedTuple):
    """One row to store: how many requests were refused, and msgpack of the latest."""

    key: RefusalKey
    kind: str
    sequence: int
    refused: int
    latest: bytes


class RefusalCount(msgspec.Struct, frozen=True, kw_only=True):
    """Refusals for one reason; `counts` are those that began in [start, start + bucket), Unix seconds, without the
    empty ones. `quota_id` and `kind` are null where no limit was in the way.
    """

    code: str
    kind: str | None
    quota_id: str | None
    count: int
    counts: list[tuple[int, int]]


class LatestRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """One refused request; `at` is its arrival in Unix seconds, `key` the id of the key it came with."""

    at: float
    request_id: str
    key: str
    code: str
    kind: str | None
    quota_id: str | None
    message: str


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's refusals of the last `window_s` seconds, most frequent reason first, and the latest requests."""

    window_s: int
    bucket_s: int
    total: int
    reasons: list[RefusalCount]
    latest: list[LatestRefusal]


_LATEST = msgspec.msgpack.Decoder(list[RefusedRequest])

_UPSERT = text(
    """
INSERT INTO refusal_windows AS w (tenant, start, code, quota_id, instance, boot_epoch, kind, sequence, count, latest)
SELECT * FROM unnest(
  CAST(:tenant AS text[]), CAST(:start AS bigint[]), CAST(:code AS text[]), CAST(:quota_id AS text[]),
  CAST(:instance AS text[]), CAST(:boot_epoch AS bigint[]), CAST(:kind AS text[]), CAST(:sequence AS bigint[]),
  CAST(:refused AS bigint[]), CAST(:latest AS bytea[]))
ON CONFLICT (tenant, start, code, quota_id, instance, boot_epoch) DO UPDATE
  SET sequence = excluded.sequence, count = excluded.count, latest = excluded.latest
  WHERE w.sequence < excluded.sequence
"""
)
_DELETE = text(
    """
WITH old AS MATERIALIZED (
  SELECT ctid FROM refusal_windows WHERE start < :before ORDER BY start LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM refusal_windows AS w USING old WHERE w.ctid = old.ctid RETURNING w.start
"""
)


def refusal_rows(report: GatewayReport, now: float) -> tuple[list[RefusalRow], list[str]]:
    """What a gateway's report says of refusals, as rows, and the reasons why the rest may not be stored. Pure."""
    rows, refused = [], []
    for window in report.windows:
        for one in window.refusals:
            try:
                check_start(window.start, now)
                check_refusals(one)
            except RefusedError as error:
                refused.append(f"refusals in window {window.start} of {one.tenant[:40]!r}: {error}")
                continue
            key = RefusalKey(one.tenant, window.start, one.code, one.quota_id, report.gateway, report.boot_epoch)
            rows.append(RefusalRow(key, one.kind, report.sequence, one.count, encode(one.latest)))
    return rows, refused


async def put(session: AsyncSession, rows: Iterable[RefusalRow]) -> None:
    """Insert rows or replace those of an older sequence. One statement; rows are locked in key order."""
    best: dict[RefusalKey, RefusalRow] = {}
    for row in rows:
        held = best.get(row.key)
        if held is None or held.sequence < row.sequence:
            best[row.key] = row
    ordered = [best[key] for key in sorted(best)]
    if ordered:
        columns: dict[str, Any] = {name: [getattr(row.key, name) for row in ordered] for name in RefusalKey._fields}
        columns |= {name: [getattr(row, name) for row in ordered] for name in RefusalRow._fields[1:]}
        await session.execute(_UPSERT, columns)


async def delete_old(session: AsyncSession, before: int, most: int) -> int:
    """Delete at most `most` rows that start before `before`; returns how many went."""
    return len((await session.scalars(_DELETE, {"before": before, "most": most})).all())


async def read(
    session: AsyncSession, tenant: str, *, window_s: int = 3600, clock: Callable[[], float] = time.time
) -> Refusals:
    """The refusals of `tenant` (slug). Two queries, bounded. Raises InvalidRequestError for another window."""
    if window_s not in BUCKETS:
        raise InvalidRequestError(f"window must be one of {', '.join(map(str, BUCKETS))} seconds", param="window")
    bucket, since = BUCKETS[window_s], int(clock()) - window_s
    counts = await _counts(session, tenant, since // WINDOW_SECONDS * WINDOW_SECONDS, bucket)
    return Refusals(
        window_s=window_s,
        bucket_s=bucket,
        total=sum(one.count for one in counts),
        reasons=counts,
        latest=await _latest(session, tenant, since),
    )


async def _counts(session: AsyncSession, tenant: str, since: int, bucket: int) -> list[RefusalCount]:
    table = RefusalWindow
    begun = (table.start - table.start % bucket).label("begun")
    names = (table.code, table.quota_id, table.kind)
    rows = await session.execute(
        select(*names, begun, func.sum(table.count))
        .where(table.tenant == tenant, table.start >= since)
        .group_by(*names, begun)
        .order_by(begun.desc())
        .limit(MOST_COUNTS)
    )
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for code, quota_id, kind, start, count in rows:
        found.setdefault((code, quota_id, kind), []).append((int(start), int(count)))
    reasons = [
        RefusalCount(
            code=code,
            kind=kind or None,
            quota_id=quota_id or None,
            count=sum(count for _, count in counts),
            counts=sorted(counts),
        )
        for (code, quota_id, kind), counts in found.items()
    ]
    return sorted(reasons, key=lambda one: (-one.count, one.code, one.quota_id or ""))


async def _latest(session: AsyncSession, tenant: str, since: int) -> list[LatestRefusal]:
    table = RefusalWindow
    rows = await session.execute(
        select(table.code, table.kind, table.quota_id, table.latest)
        .where(table.tenant == tenant, table.start >= since - WINDOW_SECONDS)
        .order_by(table.start.desc())
        .limit(_ROWS_OF_LATEST)
    )
    found = [
        LatestRefusal(
            at=one.at,
            request_id=one.request_id,
            key=one.key_id,
            code=code,
            kind=kind or None,
            quota_id=quota_id or None,
            message=one.message,
        )
        for code, kind, quota_id, packed in rows
        for one in _LATEST.decode(packed)
    ]
    return sorted(found, key=lambda one: (-one.at, one.request_id))[:MOST_LATEST]
