"""Quantiles of samples that are all at hand.

Layer: service. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Of samples in seconds: how many, and their p50 and p99 in milliseconds."""

    n: int
    p50_ms: float
    p99_ms: float


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of them do not exceed (nearest rank). Raises ValueError when empty."""
    if not samples:
        raise ValueError("no samples")
    if not 0 < share <= 1:
        raise ValueError(f"{share} is no share")
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def spread(samples: Sequence[float]) -> Spread:
    """Raises ValueError when empty."""
    return Spread(len(samples), quantile(samples, 0.5) * 1000, quantile(samples, 0.99) * 1000)
