"""Tenants and their API keys: creating, changing, rotating, revoking, and what a gateway needs of them.

Layer: service. Every function takes the caller's session and never commits. A trigger announces each change to
the gateways, so nothing here has to. The plain key leaves this module once, inside `CreatedKey`. Projects and
principals have modules of their own beside this one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import UNSET, Struct
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError
from controlplane.idempotency import check_repeat
from controlplane.paging import Cursor, Page, checked, decode, decode_uuid, page
from controlplane.tenants import keys as api_keys
from controlplane.tenants import repository
from controlplane.tenants.lookup import no_key, no_tenant, principal_of, project_of, tenant_of
from controlplane.tenants.models import ApiKey, Principal
from controlplane.tenants.schemas import (
    DEFAULT_GRACE_S,
    DEFAULT_PROJECT,
    DEFAULT_SCOPES,
    PROBE_TENANT,
    ROLE_SCOPES,
    CreatedKey,
    KeyGrant,
    KeyView,
    PrincipalRole,
    Scope,
    TenantPatch,
    TenantView,
)
from controlplane.tenants.validation import check_fields, check_grace, check_key, check_role_covers
from controlplane.tenants.views import key_grant, key_view, tenant_view


async def create_tenant(
    session: AsyncSession,
    *,
    slug: str,
    name: str,
    allowed_models: list[str] | None = None,
    priority: int = 0,
    time_zone: str = "UTC",
    weight: float = 1.0,
    floor_tokens_per_s: float = 0.0,
    metadata: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    reserved: bool = False,
) -> TenantView:
    """A new tenant with its own cache salt and a project named "default". Repeated with the same idempotency key, the
    one made before. `reserved` is for the product itself, which alone may take its reserved slug.

    Raises InvalidRequestError, or ConflictError when the slug is taken.
    """
    if slug == PROBE_TENANT and not reserved:
        raise ConflictError(f"the slug {slug} is kept for canaries", code="slug_reserved", param="slug")
    fields: dict[str, Any] = {
        "slug": slug,
        "name": name,
        "allowed_models": allowed_models,
        "priority": priority,
        "time_zone": time_zone,
        "weight": weight,
        "floor_tokens_per_s": floor_tokens_per_s,
        "metadata": dict(metadata or {}),
    }
    check_fields(**fields)
    added = await repository.add_tenant(
        session, **columns(fields), cache_salt=secrets.token_hex(16), idempotency_key=idempotency_key
    )
    if added is not None:
        await repository.add_project(session, tenant_id=added.id, slug=DEFAULT_PROJECT, name="Default")
        return tenant_view(added)
    before = await repository.tenant_by_idempotency_key(session, idempotency_key) if idempotency_key else None
    if before is not None:
        check_repeat(f"the tenant {before.slug}", asked_of(fields, before))
        return tenant_view(before)
    raise ConflictError(f"a tenant with the slug {slug} exists already", code="slug_taken", param="slug")


async def list_tenants(session: AsyncSession, *, after: str | None = None, limit: int = 50) -> Page[TenantView]:
    """Tenants, oldest first. One query."""
    limit = checked(limit)
    rows = await repository.tenants(session, after=decode_uuid(after), limit=limit)
    return page(rows, limit, tenant_view, lambda row: Cursor(row.created_at, str(row.id)))


async def get_tenant(session: AsyncSession, slug: str) -> TenantView:
    """Raises NotFoundError."""
    return tenant_view(await tenant_of(session, slug))


async def change_tenant(session: AsyncSession, slug: str, patch: TenantPatch) -> TenantView:
    """Change what `patch` sets. Raises InvalidRequestError or NotFoundError."""
    changes = changes_of(patch)
    if not changes:
        return await get_tenant(session, slug)
    check_fields(**changes)
    changed = await repository.change_tenant(session, slug, columns(changes))
    if changed is None:
        raise no_tenant(slug)
    return tenant_view(changed)


async def set_tenant_active(session: AsyncSession, slug: str, active: bool) -> TenantView:
    """An inactive tenant's keys are refused everywhere within 2 s. Raises NotFoundError."""
    return await change_tenant(session, slug, TenantPatch(active=active))


async def restore_tenant(session: AsyncSession, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
    """Change a tenant's fields back to those of `before`, a row of the history as JSON. Raises ConflictError for a
    tenant that was new or is gone.
    """
    if before is None or after is None:
        what = "a tenant that was created is not removed again: deactivate it" if before is None else "it is gone"
        raise ConflictError(f"it cannot be restored: {what}", code="not_reversible")
    if before.get("prompt_log") != after.get("prompt_log"):
        raise ConflictError(
            "it cannot be restored: a prompt log is turned on and off on the tenant's page", code="not_reversible"
        )
    await change_tenant(
        session, before["slug"], TenantPatch(**{name: before[name] for name in TenantPatch.__struct_fields__})
    )


async def create_key(
    session: AsyncSession,
    *,
    tenant_slug: str,
    name: str,
    project: str = DEFAULT_PROJECT,
    principal_id: UUID | None = None,
    scopes: Sequence[Scope] | None = None,
    allowed_models: list[str] | None = None,
    expires_at: datetime | None = None,
    metadata: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    reserved: bool = False,
) -> CreatedKey:
    """A new key of a project, owned by a principal if one is named. A repeat with the same idempotency key makes no
    second one: it is refused, naming the first, because a secret cannot be shown again.

    `scopes` None are inference and quota:read as far as the principal's role goes. `reserved` is for the product
    itself, which alone makes keys of its reserved tenant. Raises InvalidRequestError, NotFoundError or ConflictError.
    """
    if not reserved:
        _check_not_probe(tenant_slug)
    metadata = dict(metadata or {})
    now = datetime.now(UTC)
    check_key(
        name=name, allowed_models=allowed_models, expires_at=expires_at, scopes=scopes, metadata=metadata, now=now
    )
    tenant = await tenant_of(session, tenant_slug)
    home = await project_of(session, tenant, project)
    if not home.active:
        raise ConflictError(f"the project {home.slug} is not active", code="project_inactive", param="project")
    owner = None if principal_id is None else await principal_of(session, tenant, principal_id)
    if owner is not None and not owner.active:
        raise ConflictError(f"{owner.name} is not active", code="principal_inactive", param="principal_id")
    minted = api_keys.mint()
    added = await _add_key(
        session,
        minted,
        tenant_id=tenant.id,
        project_id=home.id,
        principal_id=principal_id,
        identity=minted.key_id,
        name=name,
        scopes=_scopes_for(owner, scopes),
        allowed_models=allowed_models,
        expires_at=expires_at,
        notes=metadata,
        idempotency_key=idempotency_key,
    )
    return CreatedKey(plain=minted.plain, view=key_view(added, home, owner, tenant.slug))


async def rotate_key(
    session: AsyncSession, key_id: str, *, grace_s: int = DEFAULT_GRACE_S, idempotency_key: str | None = None
) -> CreatedKey:
    """A new key with everything of the old one but its secret. The old one stays valid for `grace_s`, or until its own
    expiry if that is sooner. What is counted for the key goes on: both have one identity (F10).

    A repeat with the same idempotency key is refused as by `create_key`. Raises InvalidRequestError, NotFoundError, or
    ConflictError for a key that is revoked, expired or rotated already.
    """
    check_grace(grace_s)
    found = await repository.owned_key(session, key_id, locked=True)
    if found is None:
        raise no_key(key_id)
    _check_not_probe(found.tenant.slug)
    old, now = found.key, datetime.now(UTC)
    if idempotency_key and (made := await repository.key_by_idempotency_key(session, old.tenant_id, idempotency_key)):
        raise _repeated(made)
    _check_rotatable(old, now)
    minted = api_keys.mint()
    added = await _add_key(
        session,
        minted,
        tenant_id=old.tenant_id,
        project_id=old.project_id,
        principal_id=old.principal_id,
        identity=old.identity,
        name=old.name,
        scopes=old.scopes,
        allowed_models=old.allowed_models,
        expires_at=old.expires_at,
        notes=old.notes,
        idempotency_key=idempotency_key,
    )
    await repository.replace_key(session, key_id, by=minted.key_id, expires_at=now + timedelta(seconds=grace_s))
    return CreatedKey(plain=minted.plain, view=key_view(added, found.project, found.principal, found.tenant.slug))


async def list_keys(
    session: AsyncSession, tenant_slug: str, *, after: str | None = None, limit: int = 50
) -> Page[KeyView]:
    """A tenant's keys, oldest first, revoked ones too. Two queries. Raises NotFoundError."""
    limit = checked(limit)
    tenant = await tenant_of(session, tenant_slug)
    rows = await repository.keys(session, tenant.id, after=decode(after), limit=limit)
    return page(rows, limit, _view, lambda row: Cursor(row.key.created_at, row.key.key_id))


async def get_key(session: AsyncSession, key_id: str) -> KeyView:
    """Raises NotFoundError."""
    found = await repository.owned_key(session, key_id)
    if found is None:
        raise no_key(key_id)
    return _view(found)


async def revoke_key(session: AsyncSession, key_id: str) -> KeyView:
    """Refused everywhere within 2 s; revoking again changes nothing. The other keys of its rotations stay as they are.
    Raises NotFoundError.
    """
    found = await repository.revoke_key(session, key_id)
    if found is None:
        raise no_key(key_id)
    return _view(found)


async def retire_keys(session: AsyncSession, tenant_slug: str, *, forget_after_s: float) -> None:
    """Revoke every key of a tenant, and forget those that were revoked longer ago. Raises NotFoundError."""
    tenant = await tenant_of(session, tenant_slug)
    await repository.revoke_keys_of(session, tenant.id)
    await repository.forget_revoked_keys_of(session, tenant.id, forget_after_s)


async def load_key(session: AsyncSession, key_id: str) -> KeyGrant | None:
    """What a gateway needs to judge one key; None when there is no such key. One query."""
    found = await repository.owned_key(session, key_id)
    return None if found is None else key_grant(*found)


async def load_keys(session: AsyncSession, *, after_id: str = "", limit: int = 1000) -> list[KeyGrant]:
    """Usable keys in id order, for a gateway's snapshot: call again with the last id. One query."""
    rows = await repository.usable_keys(session, after_id=after_id, limit=limit, now=datetime.now(UTC))
    return [key_grant(*row) for row in rows]


async def policy_epoch(session: AsyncSession) -> int:
    """The number of policy changes so far; what a gateway read at an epoch holds until the next."""
    return await repository.policy_epoch(session)


async def policy_state(session: AsyncSession) -> tuple[int, datetime]:
    """The policy's epoch and when it began."""
    return await repository.policy_state(session)


def changes_of(patch: Struct) -> dict[str, Any]:
    """The fields that `patch` sets."""
    return {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}


def asked_of(fields: Mapping[str, Any], row: object) -> dict[str, tuple[object, object]]:
    """Each field as it is asked for and as `row` has it."""
    return {name: (value, getattr(row, "notes" if name == "metadata" else name)) for name, value in fields.items()}


def columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by the names of their rows' attributes: `metadata` is the framework's own there."""
    return {"notes" if name == "metadata" else name: value for name, value in fields.items()}


async def _add_key(session: AsyncSession, minted: api_keys.MintedKey, **values: Any) -> ApiKey:
    """The new row. Raises ConflictError when its idempotency key made one before."""
    added = await repository.add_key(
        session, key_id=minted.key_id, secret_hash=minted.secret_hash, last4=minted.last4, **values
    )
    if added is None:
        raise _repeated(
            await repository.key_by_idempotency_key(session, values["tenant_id"], values["idempotency_key"])
        )
    return added


def _scopes_for(owner: Principal | None, scopes: Sequence[Scope] | None) -> list[str]:
    """Those asked for, once each; the default ones as far as the owner's role goes. Raises InvalidRequestError."""
    role = PrincipalRole(owner.role) if owner else PrincipalRole.ADMIN
    if scopes is None:
        return [scope.value for scope in DEFAULT_SCOPES if scope in ROLE_SCOPES[role]]
    check_role_covers(role, scopes)
    return [scope.value for scope in Scope if scope in scopes]


def _check_not_probe(slug: str) -> None:
    """Raises ConflictError for the tenant whose keys are the canaries' alone."""
    if slug == PROBE_TENANT:
        raise ConflictError(f"the keys of {slug} are made by canaries alone", code="tenant_reserved")


def _check_rotatable(key: ApiKey, now: datetime) -> None:
    if key.revoked_at is not None:
        raise ConflictError(f"the key {key.key_id} was revoked; create a new one", code="key_revoked")
    if key.rotated_to is not None:
        raise ConflictError(
            f"the key {key.key_id} was rotated to {key.rotated_to} already; rotate that one", code="key_rotated"
        )
    if key.expires_at is not None and key.expires_at <= now:
        raise ConflictError(f"the key {key.key_id} has expired; create a new one", code="key_expired")


def _repeated(made: ApiKey | None) -> ConflictError:
    return ConflictError(
        f"this request already made the key {made.key_id if made else 'unknown'}; its secret was shown then: "
        "revoke it if it is lost",
        code="idempotency_repeated",
    )


def _view(owned: repository.OwnedKey) -> KeyView:
    return key_view(owned.key, owned.project, owned.principal, owned.tenant.slug)


async def time_zone_of(session: AsyncSession, slug: str) -> str:
    """The IANA name of the zone in which a tenant's days and months are reckoned. Raises NotFoundError."""
    return (await tenant_of(session, slug)).time_zone


async def key_ids_of(session: AsyncSession, identity: str) -> list[str]:
    """The ids of all keys of one chain of rotations, the first one's being `identity`."""
    return await repository.key_ids_of(session, identity)
