"""Whom a limit or a promise belongs to, for domains that keep things of tenants.

Layer: service. One query, and within the tenant: no name or id of another one ever answers (F36).
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from controlplane.errors import NotFoundError
from controlplane.tenants.models import ApiKey, PolicyState, Project, Tenant


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant, and in it perhaps a project or a key's identity; `epoch` is the policy's when it was read."""

    tenant_id: UUID
    tenant: str
    time_zone: str
    epoch: int
    project_id: UUID | None
    identity: str | None


class TenantClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What an active tenant may count on of a busy pool: its weight, and a floor in tokens per second."""

    weight: float
    floor_tokens_per_s: float


async def claims_of(session: AsyncSession, slugs: Sequence[str]) -> dict[str, TenantClaim]:
    """By slug, of those that are active tenants, in name order. One query, none for none."""
    if not slugs:
        return {}
    query = select(Tenant.slug, Tenant.weight, Tenant.floor_tokens_per_s).where(Tenant.active, Tenant.slug.in_(slugs))
    found = await session.execute(query.order_by(Tenant.slug))
    return {slug: TenantClaim(weight=weight, floor_tokens_per_s=floor) for slug, weight, floor in found}


async def resolve_owner(
    session: AsyncSession, tenant: str | UUID, *, project: str | UUID | None = None, key_id: str | None = None
) -> Owner:
    """The tenant of a slug or id, and of it the project, of a slug or id, and the key that are named. One query.

    Raises NotFoundError naming what bodies call it: slug, project or key.
    """
    found = await session.execute(
        select(
            Tenant.id,
            Tenant.slug,
            Tenant.time_zone,
            select(PolicyState.epoch).scalar_subquery(),
            Project.id,
            ApiKey.identity,
        )
        .outerjoin(Project, and_(Project.tenant_id == Tenant.id, _is(project, Project.id, Project.slug)))
        .outerjoin(ApiKey, and_(ApiKey.tenant_id == Tenant.id, ApiKey.key_id == key_id))
        .where(_is(tenant, Tenant.id, Tenant.slug))
    )
    row = found.one_or_none()
    if row is None:
        raise NotFoundError(f"there is no tenant {str(tenant)[:40]}", code="tenant_not_found", param="slug")
    tenant_id, slug, time_zone, epoch, project_id, identity = row
    if project is not None and project_id is None:
        raise NotFoundError(
            f"the tenant {slug} has no project {str(project)[:40]}", code="project_not_found", param="project"
        )
    if key_id is not None and identity is None:
        raise NotFoundError(f"the tenant {slug} has no API key {key_id[:11]}", code="key_not_found", param="key")
    return Owner(
        tenant_id=tenant_id, tenant=slug, time_zone=time_zone, epoch=epoch, project_id=project_id, identity=identity
    )


def _is(
    named: str | UUID | None, ids: InstrumentedAttribute[UUID], slugs: InstrumentedAttribute[str]
) -> ColumnElement[bool]:
    return ids == named if isinstance(named, UUID) else slugs == named


async def active_owners(session: AsyncSession, *, after: UUID | None, limit: int) -> list[Owner]:
    """Active tenants in id order, those after `after`. One query."""
    epoch = select(PolicyState.epoch).scalar_subquery()
    query = select(Tenant.id, Tenant.slug, Tenant.time_zone, epoch).where(Tenant.active).order_by(Tenant.id)
    if after is not None:
        query = query.where(Tenant.id > after)
    found = await session.execute(query.limit(limit))
    return [
        Owner(tenant_id=tenant_id, tenant=slug, time_zone=zone, epoch=at, project_id=None, identity=None)
        for tenant_id, slug, zone, at in found
    ]
