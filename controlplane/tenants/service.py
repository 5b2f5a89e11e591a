"""Tenants and their API keys: creating, changing, revoking, and what a gateway needs of them.

Layer: service. Every function takes the caller's session and never commits. A trigger announces each change to
the gateways, so nothing here has to. The plain key leaves this module once, inside `CreatedKey`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.paging import LARGEST, Cursor, Page, decode, page
from controlplane.tenants import keys as api_keys
from controlplane.tenants import repository
from controlplane.tenants.models import ApiKey, Project, Tenant
from controlplane.tenants.schemas import CreatedKey, KeyGrant, KeyView, TenantPatch, TenantView
from controlplane.tenants.validation import check_key, check_tenant

DEFAULT_PROJECT = "default"


async def create_tenant(
    session: AsyncSession,
    *,
    slug: str,
    name: str,
    allowed_models: list[str] | None = None,
    priority: int = 0,
    idempotency_key: str | None = None,
) -> TenantView:
    """A new tenant with its own cache salt and a project named "default". Repeated with the same idempotency key, the
    one made before.

    Raises InvalidRequestError, or ConflictError when the slug is taken.
    """
    check_tenant(slug=slug, name=name, allowed_models=allowed_models, priority=priority)
    added = await repository.add_tenant(
        session,
        slug=slug,
        name=name,
        allowed_models=allowed_models,
        priority=priority,
        cache_salt=secrets.token_hex(16),
        idempotency_key=idempotency_key,
    )
    if added is not None:
        await repository.add_project(session, tenant_id=added.id, slug=DEFAULT_PROJECT, name="Default")
        return tenant_view(added)
    before = await repository.tenant_by_idempotency_key(session, idempotency_key) if idempotency_key else None
    if before is not None:
        if before.slug != slug:
            raise ConflictError(
                f"this idempotency key already made the tenant {before.slug}", code="idempotency_mismatch"
            )
        return tenant_view(before)
    raise ConflictError(f"a tenant with the slug {slug} exists already", code="slug_taken", param="slug")


async def list_tenants(session: AsyncSession, *, after: str | None = None, limit: int = 50) -> Page[TenantView]:
    """Tenants, oldest first. One query."""
    limit = _limit(limit)
    rows = await repository.tenants(session, after=_tenant_cursor(after), limit=limit)
    return page(rows, limit, tenant_view, lambda row: Cursor(row.created_at, str(row.id)))


async def get_tenant(session: AsyncSession, slug: str) -> TenantView:
    """Raises NotFoundError."""
    return tenant_view(await _tenant(session, slug))


async def change_tenant(session: AsyncSession, slug: str, patch: TenantPatch) -> TenantView:
    """Change what `patch` sets. Raises InvalidRequestError or NotFoundError."""
    changes = {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}
    if not changes:
        return await get_tenant(session, slug)
    check_tenant(**changes)
    changed = await repository.change_tenant(session, slug, changes)
    if changed is None:
        raise _no_tenant(slug)
    return tenant_view(changed)


async def set_tenant_active(session: AsyncSession, slug: str, active: bool) -> TenantView:
    """An inactive tenant's keys are refused everywhere within 2 s. Raises NotFoundError."""
    return await change_tenant(session, slug, TenantPatch(active=active))


async def create_key(
    session: AsyncSession,
    *,
    tenant_slug: str,
    name: str,
    allowed_models: list[str] | None = None,
    expires_at: datetime | None = None,
    idempotency_key: str | None = None,
) -> CreatedKey:
    """A new key. A repeat with the same idempotency key makes no second one: it is refused, naming the first,
    because a secret cannot be shown again. Raises InvalidRequestError, NotFoundError or ConflictError.
    """
    check_key(name=name, allowed_models=allowed_models, expires_at=expires_at, now=datetime.now(UTC))
    tenant = await _tenant(session, tenant_slug)
    project = await _project(session, tenant, DEFAULT_PROJECT)
    minted = api_keys.mint()
    added = await repository.add_key(
        session,
        key_id=minted.key_id,
        tenant_id=tenant.id,
        project_id=project.id,
        identity=minted.key_id,
        name=name,
        secret_hash=minted.secret_hash,
        last4=minted.last4,
        allowed_models=allowed_models,
        expires_at=expires_at,
        idempotency_key=idempotency_key,
    )
    if added is None:
        assert idempotency_key is not None
        before = await repository.key_by_idempotency_key(session, tenant.id, idempotency_key)
        known = before.key_id if before else "unknown"
        raise ConflictError(
            f"this request already made the key {known}; its secret was shown then: revoke it if it is lost",
            code="idempotency_repeated",
        )
    return CreatedKey(plain=minted.plain, view=key_view(added, tenant.slug))


async def list_keys(
    session: AsyncSession, tenant_slug: str, *, after: str | None = None, limit: int = 50
) -> Page[KeyView]:
    """A tenant's keys, oldest first, revoked ones too. Two queries. Raises NotFoundError."""
    limit = _limit(limit)
    tenant = await _tenant(session, tenant_slug)
    rows = await repository.keys(session, tenant.id, after=decode(after), limit=limit)
    return page(rows, limit, lambda row: key_view(row, tenant.slug), lambda row: Cursor(row.created_at, row.key_id))


async def get_key(session: AsyncSession, key_id: str) -> KeyView:
    """Raises NotFoundError."""
    found = await repository.key_with_slug(session, key_id)
    if found is None:
        raise _no_key(key_id)
    return key_view(*found)


async def revoke_key(session: AsyncSession, key_id: str) -> KeyView:
    """Refused everywhere within 2 s; revoking again changes nothing. Raises NotFoundError."""
    found = await repository.revoke_key(session, key_id)
    if found is None:
        raise _no_key(key_id)
    return key_view(*found)


async def load_key(session: AsyncSession, key_id: str) -> KeyGrant | None:
    """What a gateway needs to judge one key; None when there is no such key. One query."""
    found = await repository.key_with_owners(session, key_id)
    return None if found is None else _grant(*found)


async def load_keys(session: AsyncSession, *, after_id: str = "", limit: int = 1000) -> list[KeyGrant]:
    """Usable keys in id order, for a gateway's snapshot: call again with the last id. One query."""
    rows = await repository.keys_with_owners(session, after_id=after_id, limit=limit, now=datetime.now(UTC))
    return [_grant(*row) for row in rows]


async def policy_epoch(session: AsyncSession) -> int:
    """The number of policy changes so far; what a gateway read at an epoch holds until the next."""
    return await repository.policy_epoch(session)


def tenant_view(tenant: Tenant) -> TenantView:
    """A row as operators see it."""
    return TenantView(
        id=tenant.id,
        slug=tenant.slug,
        name=tenant.name,
        allowed_models=tenant.allowed_models,
        active=tenant.active,
        priority=tenant.priority,
        created_at=tenant.created_at,
    )


def key_view(key: ApiKey, slug: str) -> KeyView:
    """A row as operators see it."""
    return KeyView(
        key_id=key.key_id,
        tenant=slug,
        name=key.name,
        hint=f"{api_keys.PREFIX}_{key.key_id}_…{key.last4}",
        allowed_models=key.allowed_models,
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
    )


def _grant(key: ApiKey, project: Project, tenant: Tenant) -> KeyGrant:
    return KeyGrant(
        key_id=key.key_id,
        secret_hash=key.secret_hash,
        tenant_id=str(tenant.id),
        tenant=tenant.slug,
        cache_salt=tenant.cache_salt,
        allowed_models=_narrower(_narrower(tenant.allowed_models, project.allowed_models), key.allowed_models),
        revoked=key.revoked_at is not None,
        tenant_active=tenant.active and project.active,
        expires_at=key.expires_at.timestamp() if key.expires_at else None,
        priority=tenant.priority,
        project_id=str(project.id),
        project=project.slug,
        identity=key.identity,
        scopes=tuple(key.scopes),
    )


def _narrower(above: Sequence[str] | None, below: Sequence[str] | None) -> tuple[str, ...] | None:
    """A project never opens more than its tenant has, nor a key more than its project."""
    if above is None or below is None:
        both = below if above is None else above
        return None if both is None else tuple(both)
    return tuple(model for model in below if model in set(above))


async def _tenant(session: AsyncSession, slug: str) -> Tenant:
    tenant = await repository.tenant_by_slug(session, slug)
    if tenant is None:
        raise _no_tenant(slug)
    return tenant


async def _project(session: AsyncSession, tenant: Tenant, slug: str) -> Project:
    project = await repository.project_by_slug(session, tenant.id, slug)
    if project is None:
        raise NotFoundError(
            f"the tenant {tenant.slug} has no project {slug[:40]}", code="project_not_found", param="project"
        )
    return project


def _tenant_cursor(after: str | None) -> Cursor | None:
    cursor = decode(after)
    if cursor is not None:
        try:
            UUID(cursor.id)
        except ValueError:
            raise InvalidRequestError("the cursor is not one of this list", param="after") from None
    return cursor


def _limit(limit: int) -> int:
    if not 1 <= limit <= LARGEST:
        raise InvalidRequestError(f"limit must lie between 1 and {LARGEST}", param="limit")
    return limit


def _no_tenant(slug: str) -> NotFoundError:
    return NotFoundError(f"there is no tenant {slug[:40]}", code="tenant_not_found", param="slug")


def _no_key(key_id: str) -> NotFoundError:
    return NotFoundError(f"there is no API key {key_id[:11]}", code="key_not_found", param="key_id")


async def time_zone_of(session: AsyncSession, slug: str) -> str:
    """The IANA name of the zone in which a tenant's days and months are reckoned. Raises NotFoundError."""
    return (await _tenant(session, slug)).time_zone


async def key_ids_of(session: AsyncSession, identity: str) -> list[str]:
    """The ids of all keys of one chain of rotations, the first one's being `identity`."""
    return await repository.key_ids_of(session, identity)
