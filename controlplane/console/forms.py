"""What people type into forms, as the services take it. Layer: service. Pure: raises InvalidRequestError by field."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from litestar import Response
from litestar.response import Redirect

from controlplane.console.pages import AnyRequest, wants_fragment
from controlplane.errors import InvalidRequestError

LONGEST_NUMBER = 26
"""Characters: twenty digits and their separators."""
_WHOLE = re.compile(r"[0-9]+|[0-9]{1,3}(?:([,_ ])[0-9]{3})(?:\1[0-9]{3})*")
"""A comma elsewhere is taken by half the world for a point: 1,5 is not fifteen."""


def whole(name: str, text: str) -> int | None:
    """A whole number, with or without separators of thousands; None for an empty field."""
    plain = text.strip()
    if not plain:
        return None
    if len(plain) > LONGEST_NUMBER or not _WHOLE.fullmatch(plain):
        raise InvalidRequestError(f"{name} must be a whole number, zero or more", param=name)
    return int(re.sub(r"[,_ ]", "", plain))


def required(name: str, text: str) -> int:
    """As `whole`; an empty field is refused."""
    amount = whole(name, text)
    if amount is None:
        raise InvalidRequestError(f"{name} is missing", param=name)
    return amount


def decimal(name: str, text: str) -> float | None:
    """A number with a point; None for an empty field."""
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequestError(f"{name} must be a number", param=name) from None


def required_decimal(name: str, text: str) -> float:
    """As `decimal`; an empty field is refused."""
    number = decimal(name, text)
    if number is None:
        raise InvalidRequestError(f"{name} is missing", param=name)
    return number


def signed(name: str, text: str) -> int:
    """A whole number that may be below zero."""
    plain = text.strip()
    if not re.fullmatch(r"[-+]?[0-9]{1,18}", plain):
        raise InvalidRequestError(f"{name} must be a whole number", param=name)
    return int(plain)


def share(name: str, text: str) -> float | None:
    """Per cent as a share of one; None for an empty field."""
    per_cent = decimal(name, text.strip().removesuffix("%"))
    return None if per_cent is None else round(per_cent / 100, 9)


def instant(name: str, text: str) -> datetime | None:
    """A date and time of a `datetime-local` field, in UTC; None for an empty field."""
    if not text.strip():
        return None
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidRequestError(f"{name} must be a date and time such as 2030-01-31T12:00", param=name) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def word(text: str) -> str | None:
    """A name; None for an empty field."""
    return text.strip() or None


def go(request: AnyRequest, path: str) -> Response[str] | Redirect:
    """After a change: htmx is told where to go, a plain form is redirected."""
    if wants_fragment(request):
        return Response("", headers={"hx-redirect": path})
    return Redirect(path, status_code=303)
