"""What the tenants service takes and answers. Layer: service."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from controlplane.settings import Secret

SLUG_PATTERN = "^[a-z0-9-]{1,40}$"

Slug = Annotated[
    str,
    Meta(
        pattern=SLUG_PATTERN,
        description="1 to 40 lower-case letters, digits and hyphens; never changes",
        examples=["acme"],
    ),
]
Name = Annotated[str, Meta(min_length=1, max_length=200, examples=["Acme Corporation"])]
Priority = Annotated[int, Meta(ge=-100, le=100, description="lower goes first, as in the engine's queue", examples=[0])]
Models = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=200)]],
    Meta(
        max_length=200, description="served model names; null allows every model", examples=[["smollm2-135m-instruct"]]
    ),
]
Moment = Annotated[datetime, Meta(tz=True, examples=["2030-01-01T00:00:00Z"])]


class KeyGrant(msgspec.Struct, frozen=True, kw_only=True):
    """All a gateway needs to know of one API key. `allowed_models` None means every model of every pool.

    `secret_hash` is SHA-256 of the key's secret part. `cache_salt` isolates the tenant's KV prefix cache. `identity`
    survives rotation: what is counted per key is counted under it.
    """

    key_id: str
    secret_hash: bytes
    tenant_id: str
    tenant: str
    cache_salt: str
    allowed_models: tuple[str, ...] | None
    revoked: bool
    tenant_active: bool
    expires_at: float | None = None
    priority: int = 0
    project_id: str = ""
    project: str = ""
    identity: str = ""
    scopes: tuple[str, ...] = ("inference", "quota:read")


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant as operators see it."""

    id: UUID
    slug: str
    name: str
    allowed_models: list[str] | None
    active: bool
    priority: int
    created_at: datetime


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """One API key as operators see it. `hint` is how it begins and ends; the secret is nowhere."""

    key_id: str
    tenant: str
    name: str
    hint: str
    allowed_models: list[str] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class CreatedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A fresh key: `plain` is shown once."""

    plain: Secret
    view: KeyView


class TenantRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new tenant."""

    slug: Slug
    name: Name
    allowed_models: Models | None = None
    priority: Priority = 0


class TenantPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is left out stays. `allowed_models: null` allows every model."""

    name: Name | UnsetType = UNSET
    allowed_models: Models | UnsetType | None = UNSET
    active: bool | UnsetType = UNSET
    priority: Priority | UnsetType = UNSET


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new API key."""

    name: Name
    allowed_models: Models | None = None
    expires_at: Moment | None = None


class CreatedKeyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is shown this once; keep it."""

    key: Annotated[str, Meta(description="the whole API key; shown this once")]
    view: KeyView
