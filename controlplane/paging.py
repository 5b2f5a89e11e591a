"""Keyset paging: a page and the cursor of the next one.

Layer: service. Pure. A cursor is the last row's sort key, so a page costs the same however deep it lies and rows
that come or go never shift it. The text is opaque to clients and checked when it comes back.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Generic, TypeVar
from uuid import UUID

import msgspec

from controlplane.errors import InvalidRequestError

Row = TypeVar("Row")
Item = TypeVar("Item")

LARGEST = 200
"""Rows in one page at most."""


class Page(msgspec.Struct, Generic[Item], frozen=True, kw_only=True):
    """`next` is the cursor of the following page, null on the last one."""

    items: list[Item]
    next: str | None = None


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Everything sorts by creation time, then by id."""

    at: datetime
    id: str


def encode(cursor: Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(cursor)).decode().rstrip("=")


def decode(text: str | None) -> Cursor | None:
    """Raises InvalidRequestError when the text is no cursor of ours."""
    if text is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(text[:256] + "=" * (-len(text[:256]) % 4))
        return msgspec.msgpack.decode(raw, type=Cursor)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise InvalidRequestError("the cursor is not one that this API gave out", param="after") from None


def decode_uuid(text: str | None) -> tuple[datetime, UUID] | None:
    """The sort key of a list by time and UUID. Raises InvalidRequestError when the text is no cursor of such a list."""
    cursor = decode(text)
    if cursor is None:
        return None
    try:
        return cursor.at, UUID(cursor.id)
    except ValueError:
        raise InvalidRequestError("the cursor is not one of this list", param="after") from None


def checked(limit: int) -> int:
    """`limit` when a page may have so many rows. Raises InvalidRequestError."""
    if not 1 <= limit <= LARGEST:
        raise InvalidRequestError(f"limit must lie between 1 and {LARGEST}", param="limit")
    return limit


def page(rows: Sequence[Row], limit: int, view: Callable[[Row], Item], key: Callable[[Row], Cursor]) -> Page[Item]:
    """A page of `limit` from rows read with `limit + 1`: one more says that there is a next page."""
    kept = rows[:limit]
    more = len(rows) > limit
    return Page(items=[view(row) for row in kept], next=encode(key(kept[-1])) if more and kept else None)
