"""Queries of the usage ledger. Layer: service. SQL only; it inserts and reads, it never changes a row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select, text, tuple_
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.ledger.models import RefusedUsage, UsageEntry
from controlplane.ledger.schemas import UsageDimension, UsageLine, UsageTotal
from controlplane.paging import Cursor
from dataplane.protocol import UsageBasis, UsageRecord, encode

_TEXT = ("attempt_id", "request_id", "tenant", "project", "key_id", "pool", "model", "replica", "finish", "basis")
_COUNTS = ("boot_epoch", "prompt_tokens", "cached_tokens", "output_tokens")
_AMOUNTS = ("kv_block_seconds", "device_seconds")
_TIMES = ("started_at", "finished_at")

_COLUMNS = [*_TEXT, *_COUNTS, *_AMOUNTS, *_TIMES]
_ARRAYS = ", ".join(
    [f"CAST(:{name} AS text[])" for name in _TEXT]
    + [f"CAST(:{name} AS bigint[])" for name in _COUNTS]
    + [f"CAST(:{name} AS double precision[])" for name in (*_AMOUNTS, *_TIMES)]
)
_VALUES = ", ".join([*_TEXT, *_COUNTS, *_AMOUNTS, *(f"to_timestamp({name})" for name in _TIMES)])
_INSERT = text(
    f"INSERT INTO usage_ledger ({', '.join(_COLUMNS)}) "  # noqa: S608  # made of the constants above
    f"SELECT {_VALUES} FROM unnest({_ARRAYS}) AS u({', '.join(_COLUMNS)}) "
    "ON CONFLICT (attempt_id) DO NOTHING RETURNING attempt_id"
)


async def insert_records(session: AsyncSession, records: Sequence[UsageRecord]) -> set[str]:
    """Insert the attempts not stored yet; returns the ids of those. `records` hold each attempt once."""
    ordered = sorted(records, key=lambda record: record.attempt_id)
    columns = {name: [getattr(record, name) for record in ordered] for name in _COLUMNS}
    columns["basis"] = [record.basis.value for record in ordered]
    return set(await session.scalars(_INSERT, columns))


async def insert_refused(session: AsyncSession, refused: Sequence[tuple[UsageRecord, str]]) -> None:
    """Keep records that cannot be billed, each once."""
    rows = {}
    for record, reason in refused:
        packed = encode(record)
        digest = hashlib.sha256(packed).digest()
        rows[digest] = {
            "digest": digest,
            "replica": record.replica.replace("\x00", "")[:200],
            "reason": reason[:1000],
            "record": packed,
        }
    statement = upsert(RefusedUsage).values([rows[digest] for digest in sorted(rows)])
    await session.execute(statement.on_conflict_do_nothing(index_elements=[RefusedUsage.digest]))


_DIMENSIONS = {
    UsageDimension.TENANT: UsageEntry.tenant,
    UsageDimension.MODEL: UsageEntry.model,
    UsageDimension.KEY: UsageEntry.key_id,
}


async def totals(
    session: AsyncSession, *, by: UsageDimension, since: datetime, until: datetime, tenant: str | None
) -> list[UsageTotal]:
    """Sums of the attempts that finished in [since, until), largest number of tokens first."""
    dimension = _DIMENSIONS[by]
    tokens = func.sum(UsageEntry.prompt_tokens + UsageEntry.output_tokens)
    query = (
        select(
            dimension.label("key"),
            func.count().label("attempts"),
            *(func.sum(getattr(UsageEntry, name)).label(name) for name in (*_COUNTS[1:], *_AMOUNTS)),
        )
        .where(UsageEntry.finished_at >= since, UsageEntry.finished_at < until)
        .group_by(dimension)
        .order_by(tokens.desc(), dimension)
    )
    if tenant is not None:
        query = query.where(UsageEntry.tenant == tenant)
    return [
        UsageTotal(
            key=row.key,
            attempts=row.attempts,
            prompt_tokens=int(row.prompt_tokens),
            cached_tokens=int(row.cached_tokens),
            output_tokens=int(row.output_tokens),
            kv_block_seconds=row.kv_block_seconds,
            device_seconds=row.device_seconds,
        )
        for row in await session.execute(query)
    ]


async def lines(
    session: AsyncSession,
    *,
    since: datetime | None,
    until: datetime | None,
    tenant: str | None,
    after: Cursor | None,
    limit: int,
) -> list[UsageLine]:
    """At most `limit` + 1 attempts that finished in [since, until), newest first, those older than `after`."""
    query: Select[*tuple[Any, ...]] = select(*(getattr(UsageEntry, name) for name in _COLUMNS))
    if since is not None:
        query = query.where(UsageEntry.finished_at >= since)
    if until is not None:
        query = query.where(UsageEntry.finished_at < until)
    if tenant is not None:
        query = query.where(UsageEntry.tenant == tenant)
    if after is not None:
        query = query.where(tuple_(UsageEntry.finished_at, UsageEntry.attempt_id) < tuple_(after.at, after.id))
    newest = query.order_by(UsageEntry.finished_at.desc(), UsageEntry.attempt_id.desc()).limit(limit + 1)
    return [
        UsageLine(**{**dict(row), "basis": UsageBasis(row["basis"])})
        for row in (await session.execute(newest)).mappings()
    ]


async def estimated_rows(session: AsyncSession) -> int:
    """The ledger's size by the planner's statistics: cheap at any size, exact at none."""
    query = text("SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'usage_ledger'::regclass")
    return int(await session.scalar(query) or 0)


# Materialised, because a plain sub-query with a LIMIT may be run again per row, and lock ever more.
_DELETE_REFUSED = text(
    """
WITH old AS MATERIALIZED (
  SELECT digest FROM usage_refused WHERE refused_at < now() - make_interval(secs => :age_s)
  ORDER BY digest LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM usage_refused AS u USING old WHERE u.digest = old.digest RETURNING u.digest
"""
)


async def delete_refused(session: AsyncSession, older_than_s: float, most: int) -> int:
    """Delete at most `most` refused records older than `older_than_s`; returns how many went."""
    gone = await session.scalars(_DELETE_REFUSED, {"age_s": older_than_s, "most": most})
    return len(gone.all())
