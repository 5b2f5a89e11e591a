"""Who acts, and what the accounts service answers about it. Layer: service."""

from __future__ import annotations

import enum
from datetime import datetime
from uuid import UUID

import msgspec


class Role(enum.StrEnum):
    """An operator changes things; a viewer reads them."""

    OPERATOR = "operator"
    VIEWER = "viewer"


class PrincipalKind(enum.StrEnum):
    USER = "user"
    TOKEN = "token"  # noqa: S105 - a kind, not a secret


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent this request: a logged-in user (`name` is the email) or an admin API token (`name` is its name)."""

    kind: PrincipalKind
    id: UUID
    name: str
    role: Role

    @property
    def may_change(self) -> bool:
        return self.role is Role.OPERATOR


class ApiTokenView(msgspec.Struct, frozen=True, kw_only=True):
    """One admin API token; never its secret."""

    id: UUID
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """One user of the console; never the password."""

    id: UUID
    email: str
    role: Role
    active: bool
    created_at: datetime
    last_login_at: datetime | None


class UserPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is left out stays. Each of these ends the user's sessions."""

    role: Role | msgspec.UnsetType = msgspec.UNSET
    active: bool | msgspec.UnsetType = msgspec.UNSET
    password: str | msgspec.UnsetType = msgspec.UNSET
