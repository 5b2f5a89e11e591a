"""How an API key reads on a page. Layer: service. Pure; the plain key passes through once, when it was just made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from controlplane.tenants.schemas import CreatedKey, KeyView, Scope

GRACES = (
    ("0", "Not at all: it ends now"),
    ("3600", "1 hour"),
    ("86400", "1 day"),
    ("604800", "7 days"),
    ("2592000", "30 days"),
)
"""How long an old key may stay valid, in seconds, as the console offers it."""

SCOPE_HELP = {
    Scope.INFERENCE: "send requests",
    Scope.QUOTA_READ: "read limits and what is left",
    Scope.QUOTA_REQUEST: "ask for more",
    Scope.USAGE_READ: "read what was used",
    Scope.ADMIN: "manage the tenant",
}


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One line of a tenant's keys; `state` is active, replaced (rotated, still valid), expired or revoked."""

    id: str
    name: str
    hint: str
    state: str
    project: str
    owner: str
    scopes: list[str]
    metadata: dict[str, str]
    allowed_models: list[str] | None
    created_at: float
    expires_at: float | None


def key_row(key: KeyView, now: datetime | None = None) -> KeyRow:
    """A revoked key is revoked, whatever its expiry."""
    return KeyRow(
        id=key.key_id,
        name=key.name,
        hint=key.hint,
        state=_state(key, now or datetime.now(UTC)),
        project=key.project,
        owner=key.principal or "",
        scopes=[scope.value for scope in key.scopes],
        metadata=key.metadata,
        allowed_models=key.allowed_models,
        created_at=key.created_at.timestamp(),
        expires_at=key.expires_at.timestamp() if key.expires_at else None,
    )


def _state(key: KeyView, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    return "replaced" if key.rotated_to else "active"


@dataclass(frozen=True, slots=True, repr=False)
class CreatedKeyText:
    """What is shown once; it has no repr, so that no log shows it again.

    `old_until` says until when the key it replaces stays valid (Unix seconds); None when it replaces none.
    """

    name: str
    plain: str
    gateway: str
    model: str
    may_infer: bool
    old_until: float | None


def created_key(created: CreatedKey, gateway: str, model: str, replaced: KeyView | None = None) -> CreatedKeyText:
    """The plain key with what a snippet needs beside it."""
    until = replaced.expires_at if replaced else None
    return CreatedKeyText(
        name=created.view.name,
        plain=created.plain.reveal(),
        gateway=gateway.rstrip("/"),
        model=model,
        may_infer=Scope.INFERENCE in created.view.scopes,
        old_until=until.timestamp() if until else None,
    )
