"""The median of paired ratios, and an interval for it that assumes nothing about their distribution.

Layer: service. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LEVEL = 0.95
"""What an interval must cover at least."""
METHOD = "order statistics of the paired ratios (sign test), two-sided, at least 95 %"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better ours is: above 1 ours wins.

    `lower` and `upper` cover the median of the ratios' distribution with the probability `confidence`; they are None
    where there are too few pairs for 95 % (fewer than six).
    """

    median: float
    lower: float | None
    upper: float | None
    confidence: float | None
    n: int


def ratio_of(ours: Sequence[float], peer: Sequence[float], *, more_is_better: bool) -> Ratio:
    """Of measurements taken in pairs, the i-th of one side beside the i-th of the other; all positive.

    Raises ValueError when they are no pairs or not positive.
    """
    if not ours or len(ours) != len(peer):
        raise ValueError(f"{len(ours)} and {len(peer)} measurements are no pairs")
    if min(*ours, *peer) <= 0:
        raise ValueError("a measurement is not positive")
    pairs = zip(ours, peer, strict=True)
    ratios = sorted(mine / other if more_is_better else other / mine for mine, other in pairs)
    rank, confidence = order_statistics(len(ratios))
    if rank is None:
        return Ratio(median(ratios), None, None, None, len(ratios))
    return Ratio(median(ratios), ratios[rank - 1], ratios[-rank], confidence, len(ratios))


def order_statistics(n: int, level: float = LEVEL) -> tuple[int | None, float | None]:
    """The largest r for which the r-th smallest and r-th largest of `n` cover the median with at least `level`, and
    with what probability they do: 1 − 2 P(B < r), B binomial with n and 1/2 (David and Nagaraja, Order Statistics,
    §7.1). (None, None) where not even the least and the greatest do.
    """
    below, rank, confidence = 0.0, None, None
    for candidate in range(1, n // 2 + 1):
        below += math.comb(n, candidate - 1) / 2**n
        if 1 - 2 * below < level:
            break
        rank, confidence = candidate, 1 - 2 * below
    return rank, confidence


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of them do not exceed (nearest rank). Raises ValueError when empty."""
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[max(1, math.ceil(share * len(samples))) - 1]
