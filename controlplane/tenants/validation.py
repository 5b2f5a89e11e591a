"""What tenants, projects, principals and keys may look like. Layer: service. Pure: raises InvalidRequestError naming
the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from typing import Any
from zoneinfo import available_timezones

from controlplane.errors import InvalidRequestError
from controlplane.tenants.schemas import (
    LONGEST_GRACE_S,
    LONGEST_METADATA_KEY,
    LONGEST_METADATA_VALUE,
    MOST_PAIRS,
    ROLE_SCOPES,
    SLUG_PATTERN,
    PrincipalKind,
    PrincipalRole,
    Scope,
)

LONGEST_NAME = 200
LONGEST_EMAIL = 254
MOST_MODELS = 200
PRIORITIES = range(-100, 101)
LIGHTEST, HEAVIEST = 0.001, 1000.0
"""Bounds of a weight: what was served is divided by it, and the sums must stay exact."""
HIGHEST_FLOOR = 1e9
"""Tokens/s; more than any pool does."""


def check_fields(**fields: Any) -> None:
    """Check those fields of a tenant or project that are given: slug, name, allowed_models, priority, time_zone,
    weight, floor_tokens_per_s, metadata.
    """
    for name, value in fields.items():
        if name in _CHECKS:
            _CHECKS[name](value)


def check_principal(*, kind: PrincipalKind, name: str, email: str | None) -> None:
    """A person has an e-mail address, a service account has none."""
    _check_name(name)
    if kind is PrincipalKind.SERVICE_ACCOUNT:
        if email is not None:
            raise InvalidRequestError("a service account has no email", param="email")
        return
    if email is None:
        raise InvalidRequestError("a person needs an email", param="email")
    if len(email) > LONGEST_EMAIL or not re.fullmatch(r"[!-?A-~]+@[!-?A-~]+", email):
        raise InvalidRequestError("email must be an e-mail address", param="email")


def check_key(
    *,
    name: str,
    allowed_models: list[str] | None,
    expires_at: datetime | None,
    scopes: Sequence[Scope] | None,
    metadata: dict[str, str],
    now: datetime,
) -> None:
    """Check a new key's fields; an expiry must name its zone and lie ahead."""
    check_fields(name=name, allowed_models=allowed_models, metadata=metadata)
    if scopes is not None and not scopes:
        raise InvalidRequestError("scopes must name at least one scope", param="scopes")
    if expires_at is not None:
        if expires_at.tzinfo is None:
            raise InvalidRequestError(
                "expires_at must name its time zone, for example a trailing Z", param="expires_at"
            )
        if expires_at <= now:
            raise InvalidRequestError("expires_at lies in the past", param="expires_at")


def check_role_covers(role: PrincipalRole, scopes: Sequence[Scope]) -> None:
    """A role bounds what its principal's keys may be made for."""
    beyond = [scope.value for scope in scopes if scope not in ROLE_SCOPES[role]]
    if beyond:
        raise InvalidRequestError(f"a key of a {role.value} may not have {', '.join(beyond)}", param="scopes")


def check_grace(grace_s: int) -> None:
    """Both keys of a rotation are valid for so long."""
    if not 0 <= grace_s <= LONGEST_GRACE_S:
        raise InvalidRequestError(f"grace_s must lie between 0 and {LONGEST_GRACE_S}", param="grace_s")


def _check_slug(slug: str) -> None:
    if not re.fullmatch(SLUG_PATTERN, slug):
        raise InvalidRequestError("slug must be 1 to 40 lower-case letters, digits and hyphens", param="slug")


def _check_name(name: str) -> None:
    if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise InvalidRequestError(f"name must have 1 to {LONGEST_NAME} printable characters", param="name")


def _check_models(models: list[str] | None) -> None:
    if models is None:
        return
    if len(models) > MOST_MODELS or any(not m.strip() or len(m) > LONGEST_NAME or not m.isprintable() for m in models):
        raise InvalidRequestError(
            f"allowed_models must be at most {MOST_MODELS} model names, or null for all", param="allowed_models"
        )


def _check_priority(priority: int) -> None:
    if priority not in PRIORITIES:
        raise InvalidRequestError("priority must lie between -100 and 100", param="priority")


def _check_time_zone(name: str) -> None:
    """What the zone files hold beside the zones is none: this machine's own, and copies that count leap seconds."""
    if name not in _zones():
        raise InvalidRequestError(
            f"time_zone: {name[:64]!r} is not an IANA time zone, such as Europe/Berlin", param="time_zone"
        )


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones() - {"localtime", "posixrules", "Factory"})


def _check_weight(weight: float) -> None:
    if not LIGHTEST <= weight <= HEAVIEST:
        raise InvalidRequestError("weight must lie between 0.001 and 1000", param="weight")


def _check_floor(floor: float) -> None:
    if not 0.0 <= floor <= HIGHEST_FLOOR:
        raise InvalidRequestError("floor_tokens_per_s must lie between 0 and 1000000000", param="floor_tokens_per_s")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MOST_PAIRS:
        raise InvalidRequestError(f"metadata must have at most {MOST_PAIRS} pairs", param="metadata")
    for key, value in metadata.items():
        if not 1 <= len(key) <= LONGEST_METADATA_KEY or not key.isprintable():
            raise InvalidRequestError(
                f"metadata: a key must have 1 to {LONGEST_METADATA_KEY} printable characters", param="metadata"
            )
        if len(value) > LONGEST_METADATA_VALUE or not value.isprintable():
            raise InvalidRequestError(
                f"metadata: the value of {key!r} must have at most {LONGEST_METADATA_VALUE} printable characters",
                param="metadata",
            )


_CHECKS: dict[str, Callable[[Any], None]] = {
    "slug": _check_slug,
    "name": _check_name,
    "allowed_models": _check_models,
    "priority": _check_priority,
    "time_zone": _check_time_zone,
    "weight": _check_weight,
    "floor_tokens_per_s": _check_floor,
    "metadata": _check_metadata,
}
