"""Queries over tenants and keys.

Layer: service. Only queries: no rules, no commit. Lists are read by keyset, one row more than asked for.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.paging import Cursor
from controlplane.tenants.models import ApiKey, PolicyState, Project, Tenant


async def add_tenant(session: AsyncSession, **values: Any) -> Tenant | None:
    """None when the slug or the idempotency key is taken."""
    added = await session.scalars(insert(Tenant).values(**values).on_conflict_do_nothing().returning(Tenant))
    return added.one_or_none()


async def add_project(session: AsyncSession, **values: Any) -> Project | None:
    """None when the slug or the idempotency key is taken in this tenant."""
    added = await session.scalars(insert(Project).values(**values).on_conflict_do_nothing().returning(Project))
    return added.one_or_none()


async def project_by_slug(session: AsyncSession, tenant_id: UUID, slug: str) -> Project | None:
    found = await session.scalars(select(Project).where(Project.tenant_id == tenant_id, Project.slug == slug))
    return found.one_or_none()


async def tenant_by_slug(session: AsyncSession, slug: str) -> Tenant | None:
    return (await session.scalars(select(Tenant).where(Tenant.slug == slug))).one_or_none()


async def tenant_by_idempotency_key(session: AsyncSession, key: str) -> Tenant | None:
    return (await session.scalars(select(Tenant).where(Tenant.idempotency_key == key))).one_or_none()


async def tenants(session: AsyncSession, *, after: Cursor | None, limit: int) -> list[Tenant]:
    query = select(Tenant).order_by(Tenant.created_at, Tenant.id).limit(limit + 1)
    if after is not None:
        query = query.where(tuple_(Tenant.created_at, Tenant.id) > tuple_(after.at, UUID(after.id)))
    return list(await session.scalars(query))


async def change_tenant(session: AsyncSession, slug: str, changes: dict[str, Any]) -> Tenant | None:
    """The changed tenant, None when there is none."""
    changed = await session.scalars(
        update(Tenant)
        .where(Tenant.slug == slug)
        .values(**changes)
        .returning(Tenant)
        .execution_options(populate_existing=True)
    )
    return changed.one_or_none()


async def add_key(session: AsyncSession, **values: Any) -> ApiKey | None:
    """None when the idempotency key is taken in this tenant."""
    statement = insert(ApiKey).values(**values)
    added = await session.scalars(
        statement.on_conflict_do_nothing(index_elements=["tenant_id", "idempotency_key"]).returning(ApiKey)
    )
    return added.one_or_none()


async def key_by_idempotency_key(session: AsyncSession, tenant_id: UUID, key: str) -> ApiKey | None:
    found = await session.scalars(select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.idempotency_key == key))
    return found.one_or_none()


async def keys(session: AsyncSession, tenant_id: UUID, *, after: Cursor | None, limit: int) -> list[ApiKey]:
    query = (
        select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.created_at, ApiKey.key_id).limit(limit + 1)
    )
    if after is not None:
        query = query.where(tuple_(ApiKey.created_at, ApiKey.key_id) > tuple_(after.at, after.id))
    return list(await session.scalars(query))


async def revoke_key(session: AsyncSession, key_id: str) -> tuple[ApiKey, str] | None:
    """The key, revoked now or before, and its tenant's slug; a second call writes nothing."""
    await session.execute(
        update(ApiKey).where(ApiKey.key_id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=func.now())
    )
    return await key_with_slug(session, key_id)


async def key_with_slug(session: AsyncSession, key_id: str) -> tuple[ApiKey, str] | None:
    found = await session.execute(
        select(ApiKey, Tenant.slug)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(ApiKey.key_id == key_id)
        .execution_options(populate_existing=True)
    )
    row = found.one_or_none()
    return None if row is None else (row[0], row[1])


async def key_with_owners(session: AsyncSession, key_id: str) -> tuple[ApiKey, Project, Tenant] | None:
    found = await session.execute(_OWNED.where(ApiKey.key_id == key_id))
    row = found.one_or_none()
    return None if row is None else (row[0], row[1], row[2])


async def keys_with_owners(
    session: AsyncSession, *, after_id: str, limit: int, now: datetime
) -> list[tuple[ApiKey, Project, Tenant]]:
    """Keys that may still be used, by id."""
    found = await session.execute(
        _OWNED.where(
            ApiKey.key_id > after_id,
            ApiKey.revoked_at.is_(None),
            ApiKey.expires_at.is_(None) | (ApiKey.expires_at > now),
            Tenant.active,
            Project.active,
        )
        .order_by(ApiKey.key_id)
        .limit(limit)
    )
    return [(row[0], row[1], row[2]) for row in found]


_OWNED = (
    select(ApiKey, Project, Tenant)
    .join(Project, Project.id == ApiKey.project_id)
    .join(Tenant, Tenant.id == ApiKey.tenant_id)
)


async def policy_epoch(session: AsyncSession) -> int:
    return (await session.scalars(select(PolicyState.epoch))).one()


async def key_ids_of(session: AsyncSession, identity: str) -> list[str]:
    rows = await session.scalars(select(ApiKey.key_id).where(ApiKey.identity == identity).order_by(ApiKey.key_id))
    return list(rows)
