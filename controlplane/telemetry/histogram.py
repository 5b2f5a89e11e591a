"""Quantiles of exponential histograms, as evidence that states its own error.

Layer: service. Pure arithmetic over `dataplane.protocol.Histogram`. It never interpolates below the bucket it
can prove, and never turns the overflow bucket into a number: that answer is ">4096 s" (F27).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from controlplane.evidence import Evidence, EvidenceKind
from controlplane.telemetry.schemas import Quantiles
from dataplane.protocol import Histogram

BUCKET_WIDTH = 2.0 ** (1 / Histogram.PER_OCTAVE) - 1.0
"""Relative width of one bucket: a reported quantile is within this of the exact sample quantile."""


class Bucket(NamedTuple):
    """The half-open interval (low, high] in seconds that holds a quantile; `high` is infinite above the top."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and (self.low < value <= self.high or value == self.low == 0.0)


def bucket_of(histogram: Histogram, q: float) -> Bucket | None:
    """The bucket that holds the `q` sample quantile by nearest rank (the ceil(q·n)-th smallest); None without samples.

    Raises ValueError when `q` is not in (0, 1].
    """
    if not 0.0 < q <= 1.0:
        raise ValueError(f"a quantile lies in (0, 1], got {q!r}")
    if histogram.count <= 0:
        return None
    rank = max(1, math.ceil(q * histogram.count))
    lowest = Histogram.upper_bound(Histogram.MIN_INDEX)
    if rank <= histogram.zero:
        return Bucket(0.0, lowest)
    seen = histogram.zero
    for index in sorted(histogram.buckets):
        seen += histogram.buckets[index]
        if rank <= seen:
            return Bucket(Histogram.upper_bound(index - 1), Histogram.upper_bound(index))
    return Bucket(Histogram.upper_bound(Histogram.MAX_INDEX), math.inf)


def quantile(histogram: Histogram, q: float, *, source: str, window_s: float | None = None) -> Evidence | None:
    """The `q` quantile in seconds: the middle of its bucket (geometric), with the bucket's width as error.

    Below the lowest bucket the value is that bucket's upper edge (about 1 µs) with error 1; above the highest it is
    the highest edge with `above` set. None without samples.
    """
    bucket = bucket_of(histogram, q)
    if bucket is None:
        return None
    above = math.isinf(bucket.high)
    if above:
        value, error = bucket.low, 0.0
    elif bucket.low == 0.0:
        value, error = bucket.high, 1.0
    else:
        value, error = math.sqrt(bucket.low * bucket.high), BUCKET_WIDTH
    return Evidence(
        value=value,
        unit="s",
        kind=EvidenceKind.OBSERVED,
        source=source,
        window_s=window_s,
        n=histogram.count,
        above=above,
        error=error,
    )


def quantiles(histogram: Histogram | None, *, source: str, window_s: float | None = None) -> Quantiles:
    """p50, p95 and p99 of `histogram`; all None without samples."""
    if histogram is None or histogram.count <= 0:
        return Quantiles(n=0)
    p50, p95, p99 = (quantile(histogram, q, source=source, window_s=window_s) for q in (0.50, 0.95, 0.99))
    return Quantiles(n=histogram.count, p50=p50, p95=p95, p99=p99)


def merged(histograms: Iterable[Histogram | None]) -> Histogram:
    """The sum of all, sharing nothing with them."""
    total = Histogram()
    for histogram in histograms:
        if histogram is not None:
            total.merge(histogram)
    return total
