"""Queries over tenants, their projects, principals and keys.

Layer: service. Only queries: no rules, no commit. Lists are read by keyset, one row more than asked for.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.paging import Cursor
from controlplane.tenants.models import ApiKey, PolicyState, Principal, Project, Tenant

Key = tuple[datetime, UUID]


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


async def project_by_idempotency_key(session: AsyncSession, tenant_id: UUID, key: str) -> Project | None:
    found = await session.scalars(select(Project).where(Project.tenant_id == tenant_id, Project.idempotency_key == key))
    return found.one_or_none()


async def projects(session: AsyncSession, tenant_id: UUID, *, after: Key | None, limit: int) -> list[Project]:
    query = (
        select(Project)
        .where(Project.tenant_id == tenant_id)
        .order_by(Project.created_at, Project.id)
        .limit(limit + 1)
        .execution_options(populate_existing=True)
    )
    if after is not None:
        query = query.where(tuple_(Project.created_at, Project.id) > tuple_(*after))
    return list(await session.scalars(query))


async def change_project(session: AsyncSession, tenant_id: UUID, slug: str, changes: dict[str, Any]) -> Project | None:
    """The changed project, None when the tenant has none of that name."""
    changed = await session.scalars(
        update(Project)
        .where(Project.tenant_id == tenant_id, Project.slug == slug)
        .values(**changes)
        .returning(Project)
        .execution_options(populate_existing=True)
    )
    return changed.one_or_none()


async def add_principal(session: AsyncSession, **values: Any) -> Principal | None:
    """None when the name or the idempotency key is taken in this tenant."""
    added = await session.scalars(insert(Principal).values(**values).on_conflict_do_nothing().returning(Principal))
    return added.one_or_none()


async def principal_by_id(session: AsyncSession, tenant_id: UUID, principal_id: UUID) -> Principal | None:
    found = await session.scalars(
        select(Principal).where(Principal.tenant_id == tenant_id, Principal.id == principal_id)
    )
    return found.one_or_none()


async def principal_by_idempotency_key(session: AsyncSession, tenant_id: UUID, key: str) -> Principal | None:
    found = await session.scalars(
        select(Principal).where(Principal.tenant_id == tenant_id, Principal.idempotency_key == key)
    )
    return found.one_or_none()


async def principals(
    session: AsyncSession, tenant_id: UUID, *, name: str | None, after: Key | None, limit: int
) -> list[Principal]:
    query = (
        select(Principal)
        .where(Principal.tenant_id == tenant_id)
        .order_by(Principal.created_at, Principal.id)
        .limit(limit + 1)
        .execution_options(populate_existing=True)
    )
    if name is not None:
        query = query.where(Principal.name == name)
    if after is not None:
        query = query.where(tuple_(Principal.created_at, Principal.id) > tuple_(*after))
    return list(await session.scalars(query))


async def change_principal(
    session: AsyncSession, tenant_id: UUID, principal_id: UUID, changes: dict[str, Any]
) -> Principal | None:
    """The changed principal, None when the tenant has none of that id."""
    changed = await session.scalars(
        update(Principal)
        .where(Principal.tenant_id == tenant_id, Principal.id == principal_id)
        .values(**changes)
        .returning(Principal)
        .execution_options(populate_existing=True)
    )
    return changed.one_or_none()


async def tenant_by_slug(session: AsyncSession, slug: str) -> Tenant | None:
    return (await session.scalars(select(Tenant).where(Tenant.slug == slug))).one_or_none()


async def tenant_by_idempotency_key(session: AsyncSession, key: str) -> Tenant | None:
    return (await session.scalars(select(Tenant).where(Tenant.idempotency_key == key))).one_or_none()


async def tenants(session: AsyncSession, *, after: Key | None, limit: int) -> list[Tenant]:
    query = select(Tenant).order_by(Tenant.created_at, Tenant.id).limit(limit + 1)
    if after is not None:
        query = query.where(tuple_(Tenant.created_at, Tenant.id) > tuple_(*after))
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


async def keys(session: AsyncSession, tenant_id: UUID, *, after: Cursor | None, limit: int) -> list[OwnedKey]:
    query = _OWNED.where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.created_at, ApiKey.key_id).limit(limit + 1)
    if after is not None:
        query = query.where(tuple_(ApiKey.created_at, ApiKey.key_id) > tuple_(after.at, after.id))
    return [OwnedKey(*row) for row in await session.execute(query)]


async def revoke_key(session: AsyncSession, key_id: str) -> OwnedKey | None:
    """The key, revoked now or before; a second call writes nothing."""
    await session.execute(
        update(ApiKey).where(ApiKey.key_id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=func.now())
    )
    return await owned_key(session, key_id)


async def revoke_keys_of(session: AsyncSession, tenant_id: UUID) -> None:
    await session.execute(
        update(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None)).values(revoked_at=func.now())
    )


async def forget_revoked_keys_of(session: AsyncSession, tenant_id: UUID, age_s: float) -> None:
    oldest = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, age_s)
    await session.execute(delete(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.revoked_at < oldest))


async def replace_key(session: AsyncSession, key_id: str, *, by: str, expires_at: datetime) -> None:
    """Say which key follows, and shorten the life of this one to `expires_at`."""
    await session.execute(
        update(ApiKey)
        .where(ApiKey.key_id == key_id)
        .values(rotated_to=by, expires_at=func.least(ApiKey.expires_at, expires_at))
    )


async def owned_key(session: AsyncSession, key_id: str, *, locked: bool = False) -> OwnedKey | None:
    """The key with its owners; `locked` until the transaction ends, so that nobody else changes it meanwhile."""
    query = _OWNED.where(ApiKey.key_id == key_id)
    if locked:
        query = query.with_for_update(of=ApiKey)
    row = (await session.execute(query)).one_or_none()
    return None if row is None else OwnedKey(*row)


async def usable_keys(session: AsyncSession, *, after_id: str, limit: int, now: datetime) -> list[OwnedKey]:
    """Keys that may be used now, by id."""
    found = await session.execute(
        _OWNED.where(
            ApiKey.key_id > after_id,
            ApiKey.revoked_at.is_(None),
            ApiKey.expires_at.is_(None) | (ApiKey.expires_at > now),
            Tenant.active,
            Project.active,
            Principal.active.is_not(False),
        )
        .order_by(ApiKey.key_id)
        .limit(limit)
    )
    return [OwnedKey(*row) for row in found]


class OwnedKey(NamedTuple):
    """A key with all it belongs to; `principal` is None when nobody owns it."""

    key: ApiKey
    project: Project
    tenant: Tenant
    principal: Principal | None


_OWNED = (
    select(ApiKey, Project, Tenant, Principal)
    .join(Project, Project.id == ApiKey.project_id)
    .join(Tenant, Tenant.id == ApiKey.tenant_id)
    .outerjoin(Principal, Principal.id == ApiKey.principal_id)
    .execution_options(populate_existing=True)
)


async def policy_epoch(session: AsyncSession) -> int:
    return (await session.scalars(select(PolicyState.epoch))).one()


async def key_ids_of(session: AsyncSession, identity: str) -> list[str]:
    rows = await session.scalars(select(ApiKey.key_id).where(ApiKey.identity == identity).order_by(ApiKey.key_id))
    return list(rows)


async def policy_state(session: AsyncSession) -> tuple[int, datetime]:
    row = (await session.execute(select(PolicyState.epoch, PolicyState.changed_at))).one()
    return row.epoch, row.changed_at
