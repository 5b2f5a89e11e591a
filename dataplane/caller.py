"""Who asks: what the gateway says of a request in its headers.

Layer: service. Pure. The replica trusts these headers because only a holder of the internal token gets this
far; it still bounds them, since they end up in reports and on disk.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping

import msgspec

from dataplane.api_error import invalid
from dataplane.protocol import (
    HEADER_ARRIVED,
    HEADER_ATTEMPT,
    HEADER_FAIR_TAG,
    HEADER_KEY,
    HEADER_PRIORITY,
    HEADER_PROJECT,
    HEADER_REQUEST,
    HEADER_SALT,
    HEADER_TENANT,
    HEADER_USAGE,
)

MAX_LENGTH = 128
MAX_PRIORITY = 1_000_000


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's identity. Ids are made here when the caller brought none."""

    attempt_id: str
    request_id: str
    tenant: str = ""
    project: str = ""
    key_id: str = ""
    salt: str = ""
    priority: int = 0
    fair_tag: float = 0.0
    arrived_at: float = 0.0
    """When the gateway had the request, Unix seconds; 0 when it did not say."""
    usage_hidden: bool = False
    """The gateway asked for the usage chunk, not the client: other chunks must not show the field."""

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Caller:
        """Read the gateway's headers (lower-case names). Raises ApiError for one that is not usable."""
        return cls(
            attempt_id=_text(headers, HEADER_ATTEMPT) or uuid.uuid4().hex,
            request_id=_text(headers, HEADER_REQUEST) or uuid.uuid4().hex,
            tenant=_text(headers, HEADER_TENANT),
            project=_text(headers, HEADER_PROJECT),
            key_id=_text(headers, HEADER_KEY),
            salt=_text(headers, HEADER_SALT),
            priority=int(_number(headers, HEADER_PRIORITY, MAX_PRIORITY)),
            fair_tag=_number(headers, HEADER_FAIR_TAG, math.inf),
            arrived_at=max(0.0, _number(headers, HEADER_ARRIVED, math.inf)),
            usage_hidden=headers.get(HEADER_USAGE) == "hidden",
        )


def _text(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "")
    if len(value) > MAX_LENGTH or not value.isprintable():
        raise invalid(f"header {name} must have at most {MAX_LENGTH} printable characters", name, "invalid_header")
    return value


def _number(headers: Mapping[str, str], name: str, limit: float) -> float:
    raw = headers.get(name, "0")
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and abs(value) <= limit):
        raise invalid(f"header {name} must be a finite number", name, "invalid_header")
    return value
