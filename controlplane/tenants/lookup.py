"""Finding a tenant and what it has, or saying in one sentence that there is none.

Layer: service. Whatever belongs to a tenant is looked up within that tenant, so that no name or id of another one ever
answers (F36). Raises NotFoundError.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import NotFoundError
from controlplane.tenants import repository
from controlplane.tenants.models import Principal, Project, Tenant


async def tenant_of(session: AsyncSession, slug: str) -> Tenant:
    """The tenant."""
    tenant = await repository.tenant_by_slug(session, slug)
    if tenant is None:
        raise no_tenant(slug)
    return tenant


async def project_of(session: AsyncSession, tenant: Tenant, slug: str) -> Project:
    """A project of `tenant`."""
    project = await repository.project_by_slug(session, tenant.id, slug)
    if project is None:
        raise no_project(tenant.slug, slug)
    return project


async def principal_of(session: AsyncSession, tenant: Tenant, principal_id: UUID) -> Principal:
    """A principal of `tenant`."""
    principal = await repository.principal_by_id(session, tenant.id, principal_id)
    if principal is None:
        raise no_principal(tenant.slug, principal_id)
    return principal


def no_tenant(slug: str) -> NotFoundError:
    return NotFoundError(f"there is no tenant {slug[:40]}", code="tenant_not_found", param="slug")


def no_project(tenant: str, slug: str) -> NotFoundError:
    return NotFoundError(
        f"the tenant {tenant[:40]} has no project {slug[:40]}", code="project_not_found", param="project"
    )


def no_principal(tenant: str, principal_id: UUID) -> NotFoundError:
    return NotFoundError(
        f"the tenant {tenant[:40]} has no principal {principal_id}", code="principal_not_found", param="principal_id"
    )


def no_key(key_id: str) -> NotFoundError:
    return NotFoundError(f"there is no API key {key_id[:11]}", code="key_not_found", param="key_id")
