"""Queries over logged requests and their readings. Layer: service. Only queries: no rules, no commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import delete, func, insert, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.promptlog.models import LoggedRequest, LoggedRequestRead
from controlplane.promptlog.schemas import LoggedEntry

# The share lock makes whoever turns it off wait for this insert, and then delete what it inserted; or this insert
# waits, and finds it off.
_STORE = text(
    """
WITH wanted AS MATERIALIZED (
  SELECT id FROM tenants WHERE id = ANY(CAST(:tenants AS uuid[])) AND prompt_log IS NOT NULL ORDER BY id FOR SHARE
)
INSERT INTO logged_requests (tenant_id, at, request_id, project, key_id, model, outcome, reason, status, prompt, answer,
                             cut, redactions)
SELECT u.tenant_id, to_timestamp(u.at), u.request_id, u.project, u.key_id, u.model, u.outcome, u.reason, u.status,
       u.prompt, u.answer, u.cut, u.redactions
FROM unnest(CAST(:tenant_id AS uuid[]), CAST(:at AS double precision[]), CAST(:request_id AS text[]),
            CAST(:project AS text[]), CAST(:key_id AS text[]), CAST(:model AS text[]), CAST(:outcome AS text[]),
            CAST(:reason AS text[]), CAST(:status AS smallint[]), CAST(:prompt AS text[]), CAST(:answer AS text[]),
            CAST(:cut AS boolean[]), CAST(:redactions AS int[]))
  AS u(tenant_id, at, request_id, project, key_id, model, outcome, reason, status, prompt, answer, cut, redactions)
JOIN wanted ON wanted.id = u.tenant_id
RETURNING id
"""
)


async def store(session: AsyncSession, entries: Sequence[LoggedEntry]) -> int:
    """Store those whose tenants want it now; returns how many."""
    columns: dict[str, Any] = {
        name: [getattr(entry, name) for entry in entries] for name in LoggedEntry.__struct_fields__
    }
    stored = await session.execute(_STORE, {"tenants": sorted(set(columns["tenant_id"])), **columns})
    return len(stored.all())


class EntryRow(NamedTuple):
    """A logged request without its texts."""

    id: int
    at: datetime
    request_id: str
    project: str
    key_id: str
    model: str
    outcome: str
    reason: str
    status: int
    cut: bool
    redactions: int
    prompt_characters: int
    answer_characters: int


_ENTRY = (
    LoggedRequest.id,
    LoggedRequest.at,
    LoggedRequest.request_id,
    LoggedRequest.project,
    LoggedRequest.key_id,
    LoggedRequest.model,
    LoggedRequest.outcome,
    LoggedRequest.reason,
    LoggedRequest.status,
    LoggedRequest.cut,
    LoggedRequest.redactions,
    func.length(LoggedRequest.prompt),
    func.length(LoggedRequest.answer),
)


async def entries(
    session: AsyncSession, tenant_id: UUID, *, before: tuple[datetime, int] | None, limit: int
) -> list[EntryRow]:
    """Newest first, one more than `limit`."""
    query = (
        select(*_ENTRY)
        .where(LoggedRequest.tenant_id == tenant_id)
        .order_by(LoggedRequest.at.desc(), LoggedRequest.id.desc())
        .limit(limit + 1)
    )
    if before is not None:
        query = query.where(tuple_(LoggedRequest.at, LoggedRequest.id) < tuple_(*before))
    return [EntryRow(*row) for row in await session.execute(query)]


async def entry(session: AsyncSession, tenant_id: UUID, entry_id: int) -> tuple[EntryRow, str, str] | None:
    """A logged request of this tenant, its prompt and its answer."""
    found = await session.execute(
        select(*_ENTRY, LoggedRequest.prompt, LoggedRequest.answer).where(
            LoggedRequest.tenant_id == tenant_id, LoggedRequest.id == entry_id
        )
    )
    row = found.one_or_none()
    return None if row is None else (EntryRow(*row[:-2]), row[-2], row[-1])


async def add_read(session: AsyncSession, **values: Any) -> None:
    await session.execute(insert(LoggedRequestRead).values(**values))


async def reads(
    session: AsyncSession, tenant: str, *, before: tuple[datetime, int] | None, limit: int
) -> list[LoggedRequestRead]:
    """Newest first, one more than `limit`."""
    query = (
        select(LoggedRequestRead)
        .where(LoggedRequestRead.tenant == tenant)
        .order_by(LoggedRequestRead.at.desc(), LoggedRequestRead.id.desc())
        .limit(limit + 1)
    )
    if before is not None:
        query = query.where(tuple_(LoggedRequestRead.at, LoggedRequestRead.id) < tuple_(*before))
    return list(await session.scalars(query))


async def delete_all(session: AsyncSession, tenant_id: UUID) -> int:
    """Delete everything of a tenant; returns how many rows went."""
    gone = await session.scalars(
        delete(LoggedRequest).where(LoggedRequest.tenant_id == tenant_id).returning(LoggedRequest.id)
    )
    return len(gone.all())


# The CTEs are materialised because a plain sub-query with a LIMIT may be run again per row, and lock ever more.
_DELETE_OLD = text(
    """
WITH old AS MATERIALIZED (
  SELECT r.id FROM logged_requests r JOIN tenants t ON t.id = r.tenant_id
  WHERE r.at < to_timestamp(:now)
    - make_interval(days => coalesce(CAST(t.prompt_log->>'retention_days' AS int), 0))
  ORDER BY r.at LIMIT :most FOR UPDATE OF r SKIP LOCKED
)
DELETE FROM logged_requests AS r USING old WHERE r.id = old.id RETURNING r.id
"""
)
_DELETE_SURPLUS = text(
    """
WITH surplus AS MATERIALIZED (
  SELECT s.id FROM tenants t CROSS JOIN LATERAL (
    SELECT r.id FROM logged_requests r WHERE r.tenant_id = t.id
    ORDER BY r.at DESC, r.id DESC OFFSET :keep LIMIT :most
  ) s WHERE t.prompt_log IS NOT NULL LIMIT :most
)
DELETE FROM logged_requests AS r USING surplus WHERE r.id = surplus.id RETURNING r.id
"""
)
_DELETE_READS = text(
    """
WITH old AS MATERIALIZED (
  SELECT id FROM logged_request_reads WHERE at < to_timestamp(:now) - make_interval(days => :days)
  ORDER BY id LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM logged_request_reads AS r USING old WHERE r.id = old.id RETURNING r.id
"""
)


async def delete_old(session: AsyncSession, now: float, most: int) -> int:
    """Delete at most `most` rows older than their tenant keeps; returns how many went."""
    return len((await session.scalars(_DELETE_OLD, {"now": now, "most": most})).all())


async def delete_surplus(session: AsyncSession, keep: int, most: int) -> int:
    """Delete at most `most` of the oldest rows of tenants that have more than `keep`; returns how many went."""
    return len((await session.scalars(_DELETE_SURPLUS, {"keep": keep, "most": most})).all())


async def delete_reads(session: AsyncSession, now: float, days: int, most: int) -> int:
    """Delete at most `most` readings older than `days`; returns how many went."""
    return len((await session.scalars(_DELETE_READS, {"now": now, "days": days, "most": most})).all())
