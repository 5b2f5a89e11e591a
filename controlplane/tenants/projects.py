"""Projects between a tenant and its keys: creating, listing, changing.

Layer: service. Every function takes the caller's session and never commits. A trigger announces each change to the
gateways under the tenant's id. The project "default" is always active: keys that name no project go there, and what
shall stop altogether is the tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError
from controlplane.idempotency import check_repeat
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.tenants import repository
from controlplane.tenants.lookup import no_project, project_of, tenant_of
from controlplane.tenants.schemas import DEFAULT_PROJECT, ProjectPatch, ProjectView
from controlplane.tenants.service import asked_of, changes_of, columns
from controlplane.tenants.validation import check_fields
from controlplane.tenants.views import project_view


async def create_project(
    session: AsyncSession,
    tenant_slug: str,
    *,
    slug: str,
    name: str,
    allowed_models: list[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
) -> ProjectView:
    """A new project. Repeated with the same idempotency key, the one made before.

    Raises InvalidRequestError, NotFoundError, or ConflictError when the tenant has one of that slug.
    """
    fields: dict[str, Any] = {
        "slug": slug,
        "name": name,
        "allowed_models": allowed_models,
        "metadata": dict(metadata or {}),
    }
    check_fields(**fields)
    tenant = await tenant_of(session, tenant_slug)
    added = await repository.add_project(
        session, tenant_id=tenant.id, idempotency_key=idempotency_key, **columns(fields)
    )
    if added is not None:
        return project_view(added, tenant.slug)
    before = (
        await repository.project_by_idempotency_key(session, tenant.id, idempotency_key) if idempotency_key else None
    )
    if before is None:
        raise ConflictError(f"the tenant {tenant.slug} has a project {slug} already", code="slug_taken", param="slug")
    check_repeat(f"the project {before.slug}", asked_of(fields, before))
    return project_view(before, tenant.slug)


async def list_projects(
    session: AsyncSession, tenant_slug: str, *, after: str | None = None, limit: int = 50
) -> Page[ProjectView]:
    """A tenant's projects, oldest first: "default" leads. Two queries. Raises NotFoundError."""
    limit = checked(limit)
    tenant = await tenant_of(session, tenant_slug)
    rows = await repository.projects(session, tenant.id, after=decode_uuid(after), limit=limit)
    return page(
        rows, limit, lambda row: project_view(row, tenant.slug), lambda row: Cursor(row.created_at, str(row.id))
    )


async def get_project(session: AsyncSession, tenant_slug: str, slug: str) -> ProjectView:
    """Raises NotFoundError."""
    tenant = await tenant_of(session, tenant_slug)
    return project_view(await project_of(session, tenant, slug), tenant.slug)


async def change_project(session: AsyncSession, tenant_slug: str, slug: str, patch: ProjectPatch) -> ProjectView:
    """Change what `patch` sets; an inactive project's keys are refused everywhere within 2 s.

    Raises InvalidRequestError, NotFoundError, or ConflictError for making "default" inactive.
    """
    changes = changes_of(patch)
    check_fields(**changes)
    tenant = await tenant_of(session, tenant_slug)
    if slug == DEFAULT_PROJECT and changes.get("active") is False:
        raise ConflictError(
            "the project default stays active, since keys without a project are its own; deactivate the tenant instead",
            code="default_project",
            param="active",
        )
    if not changes:
        return project_view(await project_of(session, tenant, slug), tenant.slug)
    changed = await repository.change_project(session, tenant.id, slug, columns(changes))
    if changed is None:
        raise no_project(tenant.slug, slug)
    return project_view(changed, tenant.slug)
