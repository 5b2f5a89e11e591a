"""What a tenant and a key may look like. Layer: service. Pure: raises InvalidRequestError naming the field."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from controlplane.errors import InvalidRequestError
from controlplane.tenants.schemas import SLUG_PATTERN

LONGEST_NAME = 200
MOST_MODELS = 200
PRIORITIES = range(-100, 101)


def check_tenant(**fields: Any) -> None:
    """Check those of slug, name, allowed_models and priority that are given."""
    if "slug" in fields and not re.fullmatch(SLUG_PATTERN, fields["slug"]):
        raise InvalidRequestError("slug must be 1 to 40 lower-case letters, digits and hyphens", param="slug")
    if "name" in fields:
        _check_name(fields["name"])
    if "allowed_models" in fields:
        _check_models(fields["allowed_models"])
    if "priority" in fields and fields["priority"] not in PRIORITIES:
        raise InvalidRequestError("priority must lie between -100 and 100", param="priority")


def check_key(*, name: str, allowed_models: list[str] | None, expires_at: datetime | None, now: datetime) -> None:
    """Check a new key's fields; an expiry must name its zone and lie ahead."""
    _check_name(name)
    _check_models(allowed_models)
    if expires_at is not None:
        if expires_at.tzinfo is None:
            raise InvalidRequestError(
                "expires_at must name its time zone, for example a trailing Z", param="expires_at"
            )
        if expires_at <= now:
            raise InvalidRequestError("expires_at lies in the past", param="expires_at")


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
