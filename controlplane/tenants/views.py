"""Rows as operators and gateways see them. Layer: service. Pure: no secret, no salt and no hash but in a grant."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from controlplane.tenants import keys as api_keys
from controlplane.tenants.models import ApiKey, Principal, Project, Tenant
from controlplane.tenants.schemas import (
    ROLE_SCOPES,
    KeyGrant,
    KeyView,
    PrincipalKind,
    PrincipalRole,
    PrincipalView,
    ProjectView,
    PromptLogging,
    Scope,
    TenantView,
)


def tenant_view(tenant: Tenant) -> TenantView:
    return TenantView(
        id=tenant.id,
        slug=tenant.slug,
        name=tenant.name,
        allowed_models=tenant.allowed_models,
        active=tenant.active,
        priority=tenant.priority,
        time_zone=tenant.time_zone,
        weight=tenant.weight,
        floor_tokens_per_s=tenant.floor_tokens_per_s,
        metadata=tenant.notes,
        created_at=tenant.created_at,
    )


def project_view(project: Project, tenant: str) -> ProjectView:
    return ProjectView(
        id=project.id,
        tenant=tenant,
        slug=project.slug,
        name=project.name,
        allowed_models=project.allowed_models,
        active=project.active,
        metadata=project.notes,
        created_at=project.created_at,
    )


def principal_view(principal: Principal, tenant: str) -> PrincipalView:
    role = PrincipalRole(principal.role)
    return PrincipalView(
        id=principal.id,
        tenant=tenant,
        kind=PrincipalKind(principal.kind),
        name=principal.name,
        email=principal.email,
        role=role,
        active=principal.active,
        scopes=[scope for scope in Scope if scope in ROLE_SCOPES[role]],
        created_at=principal.created_at,
    )


def key_view(key: ApiKey, project: Project, principal: Principal | None, tenant: str) -> KeyView:
    return KeyView(
        key_id=key.key_id,
        tenant=tenant,
        project=project.slug,
        principal_id=principal.id if principal else None,
        principal=principal.name if principal else None,
        identity=key.identity,
        rotated_to=key.rotated_to,
        scopes=list(scopes_now(key, principal)),
        metadata=key.notes,
        name=key.name,
        hint=f"{api_keys.PREFIX}_{key.key_id}_…{key.last4}",
        allowed_models=key.allowed_models,
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
    )


def key_grant(key: ApiKey, project: Project, tenant: Tenant, principal: Principal | None) -> KeyGrant:
    """What a gateway judges the key by."""
    return KeyGrant(
        key_id=key.key_id,
        secret_hash=key.secret_hash,
        tenant_id=str(tenant.id),
        tenant=tenant.slug,
        cache_salt=tenant.cache_salt,
        allowed_models=_narrower(_narrower(tenant.allowed_models, project.allowed_models), key.allowed_models),
        revoked=key.revoked_at is not None,
        tenant_active=tenant.active,
        expires_at=key.expires_at.timestamp() if key.expires_at else None,
        priority=tenant.priority,
        project_id=str(project.id),
        project=project.slug,
        identity=key.identity,
        scopes=scopes_now(key, principal),
        project_active=project.active,
        principal_active=principal is None or principal.active,
        prompt_log=read_prompt_logging(tenant.prompt_log),
        weight=tenant.weight,
    )


def scopes_now(key: ApiKey, principal: Principal | None) -> tuple[Scope, ...]:
    """The key's scopes that its owner's role allows: a role taken away takes effect on keys made before."""
    allowed = ROLE_SCOPES[PrincipalRole(principal.role)] if principal else frozenset(Scope)
    return tuple(scope for scope in Scope if scope in allowed and scope in key.scopes)


def _narrower(above: Sequence[str] | None, below: Sequence[str] | None) -> tuple[str, ...] | None:
    """A project never opens more than its tenant has, nor a key more than its project."""
    if above is None or below is None:
        both = below if above is None else above
        return None if both is None else tuple(both)
    return tuple(model for model in below if model in set(above))


def read_prompt_logging(stored: dict[str, object] | None) -> PromptLogging | None:
    """What a tenant's row says of keeping its prompts."""
    return None if stored is None else msgspec.convert(stored, PromptLogging)
