"""What the tenants domain takes and answers. Layer: service."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from controlplane.settings import Secret

SLUG_PATTERN = "^[a-z0-9-]{1,40}$"
DEFAULT_PROJECT = "default"
PROBE_TENANT = "tidegate-probe"
"""The reserved slug of the tenant that canaries act as."""

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
MOST_PAIRS = 16
LONGEST_METADATA_KEY = 64
LONGEST_METADATA_VALUE = 512
Metadata = Annotated[
    dict[
        Annotated[str, Meta(min_length=1, max_length=LONGEST_METADATA_KEY)],
        Annotated[str, Meta(max_length=LONGEST_METADATA_VALUE)],
    ],
    Meta(
        max_length=MOST_PAIRS,
        description="up to 16 pairs of printable text; a change replaces them all",
        examples=[{"cost-centre": "4711"}],
    ),
]
TimeZone = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=64,
        description="IANA name; days and months of quotas and statements begin at its midnight",
        examples=["Europe/Berlin"],
    ),
]
Weight = Annotated[
    float,
    Meta(ge=0.001, le=1000, description="share of a busy pool, relative to other tenants' weights", examples=[1.0]),
]
Floor = Annotated[
    float,
    Meta(ge=0, le=1e9, description="tokens/s that a flood of others never takes away; 0 for none", examples=[0.0]),
]
LONGEST_GRACE_S = 30 * 86_400
DEFAULT_GRACE_S = 86_400
Grace = Annotated[
    int,
    Meta(
        ge=0,
        le=LONGEST_GRACE_S,
        description="seconds that the old key stays valid, never longer than its own expiry",
        examples=[DEFAULT_GRACE_S],
    ),
]


class Scope(enum.StrEnum):
    """What a key may be used for."""

    INFERENCE = "inference"
    QUOTA_READ = "quota:read"
    QUOTA_REQUEST = "quota:request"
    USAGE_READ = "usage:read"
    ADMIN = "admin"


DEFAULT_SCOPES = (Scope.INFERENCE, Scope.QUOTA_READ)
Scopes = Annotated[
    list[Scope],
    Meta(
        min_length=1,
        max_length=len(Scope),
        description="what the key may be used for; left out: inference and quota:read, as far as its owner's role goes",
        examples=[list(DEFAULT_SCOPES)],
    ),
]


class PrincipalKind(enum.StrEnum):
    """Whether keys are owned by a person or by a program."""

    PERSON = "person"
    SERVICE_ACCOUNT = "service_account"


class PrincipalRole(enum.StrEnum):
    """What a principal's keys may be used for at most."""

    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"


_VIEWER = frozenset({Scope.QUOTA_READ, Scope.USAGE_READ})
_MEMBER = _VIEWER | {Scope.INFERENCE, Scope.QUOTA_REQUEST}
ROLE_SCOPES: dict[PrincipalRole, frozenset[Scope]] = {
    PrincipalRole.VIEWER: _VIEWER,
    PrincipalRole.MEMBER: _MEMBER,
    PrincipalRole.ADMIN: _MEMBER | {Scope.ADMIN},
}


class Redaction(enum.StrEnum):
    """What is taken out of a prompt before it is kept."""

    EMAILS = "emails"
    CARDS = "cards"
    SECRETS = "secrets"
    PHONES = "phones"


class PromptLogging(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tenant wants its prompts and answers kept. `templates` name what else is taken out: `#` stands for a digit,
    `@` for a letter, `?` for either, all else for itself.
    """

    retention_days: Annotated[int, Meta(ge=1, le=30, description="days until a request is deleted")] = 7
    sample: Annotated[float, Meta(gt=0, le=1, description="share of requests that is kept")] = 1.0
    redact: Annotated[list[Redaction], Meta(max_length=8)] = msgspec.field(default_factory=lambda: list(Redaction))
    templates: Annotated[
        list[Annotated[str, Meta(min_length=3, max_length=64)]],
        Meta(max_length=20, description="what else is taken out", examples=[["EMP-######"]]),
    ] = []


class KeyGrant(msgspec.Struct, frozen=True, kw_only=True):
    """All a gateway needs to know of one API key. `allowed_models` None means every model of every pool.

    `secret_hash` is SHA-256 of the key's secret part. `cache_salt` isolates the tenant's KV prefix cache. `identity`
    survives rotation: what is counted per key is counted under it. `scopes` are those of the key that its owner's role
    allows now.
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
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    project_active: bool = True
    principal_active: bool = True
    prompt_log: PromptLogging | None = None
    """None unless the tenant has asked for its prompts to be kept."""
    weight: float = 1.0
    """The tenant's share of a busy pool, relative to others'."""


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant as operators see it."""

    id: UUID
    slug: str
    name: str
    allowed_models: list[str] | None
    active: bool
    priority: int
    time_zone: str
    weight: float
    floor_tokens_per_s: float
    metadata: dict[str, str]
    created_at: datetime


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """One project as operators see it. `allowed_models` null means whatever the tenant may use."""

    id: UUID
    tenant: str
    slug: str
    name: str
    allowed_models: list[str] | None
    active: bool
    metadata: dict[str, str]
    created_at: datetime


class PrincipalView(msgspec.Struct, frozen=True, kw_only=True):
    """A person, who has an e-mail address, or a service account. `scopes` are the most its keys may carry."""

    id: UUID
    tenant: str
    kind: PrincipalKind
    name: str
    email: str | None
    role: PrincipalRole
    active: bool
    scopes: list[Scope]
    created_at: datetime


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """One API key as operators see it. `hint` is how it begins and ends; the secret is nowhere.

    `identity` is the id of the first key of a chain of rotations, `rotated_to` the key that replaces this one.
    `scopes` are those that count now, within the role of its owner (`principal`, null when it has none).
    """

    key_id: str
    tenant: str
    project: str
    principal_id: UUID | None
    principal: str | None
    identity: str
    rotated_to: str | None
    scopes: list[Scope]
    metadata: dict[str, str]
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
    time_zone: TimeZone = "UTC"
    weight: Weight = 1.0
    floor_tokens_per_s: Floor = 0.0
    metadata: Metadata = {}


class TenantPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is left out stays. `allowed_models: null` allows every model."""

    name: Name | UnsetType = UNSET
    allowed_models: Models | UnsetType | None = UNSET
    active: bool | UnsetType = UNSET
    priority: Priority | UnsetType = UNSET
    time_zone: TimeZone | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    floor_tokens_per_s: Floor | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET


class ProjectRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new project of a tenant."""

    slug: Slug
    name: Name
    allowed_models: Models | None = None
    metadata: Metadata = {}


class ProjectPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is left out stays. `allowed_models: null` allows what the tenant may use."""

    name: Name | UnsetType = UNSET
    allowed_models: Models | UnsetType | None = UNSET
    active: bool | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET


class PrincipalRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new person, who needs an e-mail address, or a new service account, which has none."""

    kind: PrincipalKind
    name: Name
    role: PrincipalRole
    email: Annotated[str, Meta(max_length=254, examples=["ada@example.com"])] | None = None


class PrincipalPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is left out stays."""

    role: PrincipalRole | UnsetType = UNSET
    active: bool | UnsetType = UNSET


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new API key."""

    name: Name
    project: Slug = DEFAULT_PROJECT
    principal_id: UUID | None = None
    scopes: Scopes | None = None
    allowed_models: Models | None = None
    expires_at: Moment | None = None
    metadata: Metadata = {}


class RotationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the old key stays valid beside the new one."""

    grace_s: Grace = DEFAULT_GRACE_S


class CreatedKeyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is shown this once; keep it."""

    key: Annotated[str, Meta(description="the whole API key; shown this once")]
    view: KeyView
