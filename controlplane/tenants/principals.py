"""Principals, the people and service accounts who own a tenant's keys: creating, listing, changing.

Layer: service. Every function takes the caller's session and never commits. A trigger announces each change to the
gateways under the tenant's id. A role bounds the scopes of its principal's keys, those made before it changed too.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError
from controlplane.idempotency import check_repeat
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.tenants import repository
from controlplane.tenants.lookup import no_principal, principal_of, tenant_of
from controlplane.tenants.schemas import PrincipalKind, PrincipalPatch, PrincipalRole, PrincipalView
from controlplane.tenants.service import asked_of, changes_of
from controlplane.tenants.validation import check_principal
from controlplane.tenants.views import principal_view


async def create_principal(
    session: AsyncSession,
    tenant_slug: str,
    *,
    kind: PrincipalKind,
    name: str,
    role: PrincipalRole,
    email: str | None = None,
    idempotency_key: str | None = None,
) -> PrincipalView:
    """A new person or service account. Repeated with the same idempotency key, the one made before.

    Raises InvalidRequestError, NotFoundError, or ConflictError when the tenant has one of that name.
    """
    check_principal(kind=kind, name=name, email=email)
    tenant = await tenant_of(session, tenant_slug)
    fields = {"kind": kind.value, "name": name, "email": email.lower() if email else None, "role": role.value}
    added = await repository.add_principal(session, tenant_id=tenant.id, idempotency_key=idempotency_key, **fields)
    if added is not None:
        return principal_view(added, tenant.slug)
    before = (
        await repository.principal_by_idempotency_key(session, tenant.id, idempotency_key) if idempotency_key else None
    )
    if before is None:
        raise ConflictError(
            f"the tenant {tenant.slug} has a principal named {name} already", code="name_taken", param="name"
        )
    check_repeat(f"the principal {before.name}", asked_of(fields, before))
    return principal_view(before, tenant.slug)


async def list_principals(
    session: AsyncSession, tenant_slug: str, *, name: str | None = None, after: str | None = None, limit: int = 50
) -> Page[PrincipalView]:
    """A tenant's principals, oldest first, or the one named `name`. Two queries. Raises NotFoundError."""
    limit = checked(limit)
    tenant = await tenant_of(session, tenant_slug)
    rows = await repository.principals(session, tenant.id, name=name, after=decode_uuid(after), limit=limit)
    return page(
        rows, limit, lambda row: principal_view(row, tenant.slug), lambda row: Cursor(row.created_at, str(row.id))
    )


async def get_principal(session: AsyncSession, tenant_slug: str, principal_id: UUID) -> PrincipalView:
    """Raises NotFoundError."""
    tenant = await tenant_of(session, tenant_slug)
    return principal_view(await principal_of(session, tenant, principal_id), tenant.slug)


async def change_principal(
    session: AsyncSession, tenant_slug: str, principal_id: UUID, patch: PrincipalPatch
) -> PrincipalView:
    """Change role or active; both take effect on the principal's keys within 2 s. Raises NotFoundError."""
    changes = changes_of(patch)
    tenant = await tenant_of(session, tenant_slug)
    if not changes:
        return principal_view(await principal_of(session, tenant, principal_id), tenant.slug)
    changed = await repository.change_principal(session, tenant.id, principal_id, changes)
    if changed is None:
        raise no_principal(tenant.slug, principal_id)
    return principal_view(changed, tenant.slug)
