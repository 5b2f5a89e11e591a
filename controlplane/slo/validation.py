"""What objectives may look like. Layer: service. Pure: raises InvalidRequestError naming the field."""

from __future__ import annotations

import math
import re

from controlplane.errors import InvalidRequestError
from controlplane.slo.schemas import CLASS_PATTERN, LONGEST_WINDOW_DAYS

LONGEST_MS = 3_600_000


def check_objectives(
    *,
    ttft_ms: int | None,
    ttft_share: float | None,
    tpot_ms: float | None,
    tpot_share: float | None,
    availability: float | None,
    window_days: int,
) -> None:
    """At least one objective, each with its share, and a window to judge it over."""
    _check_latency("ttft", ttft_ms, ttft_share)
    _check_latency("tpot", tpot_ms, tpot_share)
    _check_share("availability", availability)
    if ttft_ms is None and tpot_ms is None and availability is None:
        raise InvalidRequestError("objectives need a TTFT, a TPOT or an availability", param="ttft_ms")
    if not 1 <= window_days <= LONGEST_WINDOW_DAYS:
        raise InvalidRequestError(f"window_days must lie between 1 and {LONGEST_WINDOW_DAYS}", param="window_days")


def check_class(name: str | None) -> str:
    """A class as stored: empty for None, which stands for any."""
    if name is None:
        return ""
    if not re.fullmatch(CLASS_PATTERN, name):
        raise InvalidRequestError("class must be 1 to 40 lower-case letters, digits and hyphens", param="class")
    return name


def check_pool(name: str | None) -> str:
    """A pool as stored: empty for None, which stands for any."""
    if name is None:
        return ""
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise InvalidRequestError("pool must have 1 to 200 printable characters, or be null", param="pool")
    return name


def _check_latency(name: str, limit_ms: float | None, share: float | None) -> None:
    if limit_ms is not None and not (math.isfinite(limit_ms) and 0 < limit_ms <= LONGEST_MS):
        raise InvalidRequestError(f"{name}_ms must lie between 0 and {LONGEST_MS}", param=f"{name}_ms")
    _check_share(f"{name}_share", share)
    if (limit_ms is None) != (share is None):
        missing = f"{name}_ms" if limit_ms is None else f"{name}_share"
        raise InvalidRequestError(f"{name}_ms and {name}_share go together: {missing} is missing", param=missing)


def _check_share(name: str, share: float | None) -> None:
    if share is not None and not 0 < share < 1:
        raise InvalidRequestError(f"{name} is a share of requests: above 0 and below 1", param=name)
