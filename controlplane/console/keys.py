"""How an API key reads on a page. Layer: service. Pure; the plain key passes through once, when it was just made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from controlplane.tenants.schemas import CreatedKey, KeyView


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One line of a tenant's keys; `state` is active, expired or revoked."""

    id: str
    name: str
    hint: str
    state: str
    allowed_models: list[str] | None
    created_at: float
    expires_at: float | None


def key_row(key: KeyView, now: datetime | None = None) -> KeyRow:
    """A revoked key is revoked, whatever its expiry."""
    now = now or datetime.now(UTC)
    expired = key.expires_at is not None and key.expires_at <= now
    return KeyRow(
        id=key.key_id,
        name=key.name,
        hint=key.hint,
        state="revoked" if key.revoked_at is not None else "expired" if expired else "active",
        allowed_models=key.allowed_models,
        created_at=key.created_at.timestamp(),
        expires_at=key.expires_at.timestamp() if key.expires_at else None,
    )


@dataclass(frozen=True, slots=True, repr=False)
class CreatedKeyText:
    """What is shown once; it has no repr, so that no log shows it again."""

    name: str
    plain: str
    gateway: str
    model: str


def created_key(created: CreatedKey, gateway: str, model: str) -> CreatedKeyText:
    """The plain key with what a snippet needs beside it."""
    return CreatedKeyText(
        name=created.view.name, plain=created.plain.reveal(), gateway=gateway.rstrip("/"), model=model
    )
