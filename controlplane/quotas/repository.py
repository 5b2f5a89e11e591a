"""Queries over quotas and their temporary raises.

Layer: service. Only queries: no rules, no commit. Lists are read by keyset, one row more than asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import and_, delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.quotas.models import Grant, Quota
from controlplane.quotas.schemas import QuotaKind

Key = tuple[datetime, UUID]


async def add_quota(session: AsyncSession, **values: Any) -> Quota | None:
    """None when the scope has such a limit, or the idempotency key is taken in this tenant."""
    added = await session.scalars(insert(Quota).values(**values).on_conflict_do_nothing().returning(Quota))
    return added.one_or_none()


async def quota_by_idempotency_key(session: AsyncSession, tenant_id: UUID, key: str) -> Quota | None:
    found = await session.scalars(select(Quota).where(Quota.tenant_id == tenant_id, Quota.idempotency_key == key))
    return found.one_or_none()


async def quota_by_scope(
    session: AsyncSession,
    *,
    tenant_id: UUID,
    project_id: UUID | None,
    identity: str | None,
    model: str,
    kind: QuotaKind,
) -> Quota | None:
    found = await session.scalars(
        select(Quota).where(
            Quota.tenant_id == tenant_id,
            Quota.project_id.is_not_distinct_from(project_id),
            Quota.key_identity.is_not_distinct_from(identity),
            Quota.model == model,
            Quota.kind == kind,
        )
    )
    return found.one_or_none()


async def count_quotas(session: AsyncSession, tenant_id: UUID) -> int:
    return int(await session.scalar(select(func.count()).where(Quota.tenant_id == tenant_id)) or 0)


async def quota(session: AsyncSession, quota_id: UUID, *, lock: bool = False) -> Quota | None:
    query = select(Quota).where(Quota.id == quota_id).execution_options(populate_existing=True)
    return (await session.scalars(query.with_for_update() if lock else query)).one_or_none()


async def quotas(
    session: AsyncSession,
    tenant_id: UUID,
    *,
    project: str | None,
    kind: QuotaKind | None,
    after: Key | None,
    limit: int,
) -> list[Quota]:
    query = select(Quota).where(Quota.tenant_id == tenant_id).order_by(Quota.created_at, Quota.id).limit(limit + 1)
    if project is not None:
        query = query.where(Quota.project == project)
    if kind is not None:
        query = query.where(Quota.kind == kind)
    if after is not None:
        query = query.where(tuple_(Quota.created_at, Quota.id) > tuple_(*after))
    return list(await session.scalars(query))


async def counts(session: AsyncSession, tenant_ids: Collection[UUID]) -> dict[UUID, int]:
    """How many limits each of these tenants has; those without any are left out."""
    found = await session.execute(
        select(Quota.tenant_id, func.count()).where(Quota.tenant_id.in_(tenant_ids)).group_by(Quota.tenant_id)
    )
    return {row[0]: row[1] for row in found}


async def change_quota(session: AsyncSession, quota_id: UUID, changes: dict[str, Any]) -> Quota:
    """The changed quota, which the caller has locked."""
    changed = await session.scalars(
        update(Quota)
        .where(Quota.id == quota_id)
        .values(**changes, updated_at=func.now())
        .returning(Quota)
        .execution_options(populate_existing=True)
    )
    return changed.one()


async def delete_quota(session: AsyncSession, quota_id: UUID) -> None:
    await session.execute(delete(Quota).where(Quota.id == quota_id))


async def raised(session: AsyncSession, quota_ids: Collection[UUID], now: datetime) -> dict[UUID, int]:
    """What the raises in force at `now` add to each of these quotas; those without any are left out."""
    found = await session.execute(
        select(Grant.quota_id, func.sum(Grant.amount))
        .where(Grant.quota_id.in_(quota_ids), Grant.starts_at <= now, Grant.expires_at > now)
        .group_by(Grant.quota_id)
    )
    return {row[0]: int(row[1]) for row in found}


async def not_over(session: AsyncSession, quota_id: UUID, now: datetime) -> list[Grant]:
    """The raises of a quota that are in force or yet to come."""
    return list(await session.scalars(select(Grant).where(Grant.quota_id == quota_id, Grant.expires_at > now)))


async def add_grant(session: AsyncSession, **values: Any) -> Grant | None:
    """None when the idempotency key is taken for this quota."""
    added = await session.scalars(insert(Grant).values(**values).on_conflict_do_nothing().returning(Grant))
    return added.one_or_none()


async def grant_by_idempotency_key(session: AsyncSession, quota_id: UUID, key: str) -> Grant | None:
    found = await session.scalars(select(Grant).where(Grant.quota_id == quota_id, Grant.idempotency_key == key))
    return found.one_or_none()


async def grants(session: AsyncSession, quota_id: UUID, *, after: Key | None, limit: int) -> list[Grant]:
    query = select(Grant).where(Grant.quota_id == quota_id).order_by(Grant.created_at, Grant.id).limit(limit + 1)
    if after is not None:
        query = query.where(tuple_(Grant.created_at, Grant.id) > tuple_(*after))
    return list(await session.scalars(query))


async def end_grant(session: AsyncSession, quota_id: UUID, grant_id: UUID, now: datetime) -> Grant | None:
    """The raise, ended now unless it is over; one that has not started never starts."""
    await session.execute(
        update(Grant)
        .where(Grant.id == grant_id, Grant.quota_id == quota_id, Grant.expires_at > now)
        .values(expires_at=func.greatest(now, Grant.starts_at))
    )
    found = await session.scalars(
        select(Grant).where(Grant.id == grant_id, Grant.quota_id == quota_id).execution_options(populate_existing=True)
    )
    return found.one_or_none()


async def change_grant(session: AsyncSession, grant_id: UUID, expires_at: datetime) -> None:
    """Let a raise end at another time."""
    await session.execute(update(Grant).where(Grant.id == grant_id).values(expires_at=expires_at))


async def with_grants(
    session: AsyncSession, tenant_ids: Collection[UUID], now: datetime
) -> list[tuple[Quota, Grant | None]]:
    """All limits of these tenants in a fixed order, each once for every raise in force or yet to come, else once."""
    found = await session.execute(
        select(Quota, Grant)
        .outerjoin(Grant, and_(Grant.quota_id == Quota.id, Grant.expires_at > now))
        .where(Quota.tenant_id.in_(tenant_ids))
        .order_by(Quota.tenant_id, Quota.kind, Quota.model, Quota.id, Grant.starts_at, Grant.id)
    )
    return [(row[0], row[1]) for row in found]
