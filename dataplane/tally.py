"""Numbers that only add up: the base of every counter struct, and the latency histogram.

Layer: service. Wire structs without torch or I/O; `dataplane.protocol` builds on them and offers them on, so
that the control plane finds everything there. Nothing here knows what is being counted.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import msgspec


class Tally(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of everything that only ever adds up: numbers, dicts and lists of them, nested tallies."""

    def merge(self, other: Self, sign: int = 1) -> None:
        """Add `other` field by field (`sign` −1 subtracts an earlier snapshot of the same counters)."""
        for name in self.__struct_fields__:
            setattr(self, name, _add(getattr(self, name), getattr(other, name), sign))

    def copy(self) -> Self:
        """A deep copy that shares nothing with this tally."""
        fresh = type(self)()
        fresh.merge(self)
        return fresh

    def since(self, earlier: Self) -> Self:
        """What was added after `earlier`, a snapshot of the same counters."""
        delta = self.copy()
        delta.merge(earlier, sign=-1)
        return delta


def _add(mine: Any, theirs: Any, sign: int) -> Any:
    if theirs is None:
        return mine
    if mine is None:
        mine = type(theirs)()
    if isinstance(theirs, Tally):
        mine.merge(theirs, sign)
        return mine
    if isinstance(theirs, dict):
        merged = {key: _add(mine.get(key), value, sign) for key, value in theirs.items()}
        return {key: value for key, value in {**mine, **merged}.items() if value != type(value)()}
    if isinstance(theirs, list):
        longer = max(len(mine), len(theirs))
        return [
            _add(mine[i] if i < len(mine) else None, theirs[i] if i < len(theirs) else None, sign)
            for i in range(longer)
        ]
    return mine + sign * theirs


class Histogram(Tally, kw_only=True):
    """OpenTelemetry exponential histogram, schema 3, sparse and mergeable by addition.

    Bucket `i` holds values in (2^((i−1)/8), 2^(i/8)], so a quantile is known to within 9.05 % of itself.
    `zero` counts values at or below `2^(MIN_INDEX/8)` (about 1 µs); `over` counts values above
    `2^(MAX_INDEX/8)` (4,096 s): a quantile that falls there is ">4096 s", never a number.
    Source: OpenTelemetry metrics data model, ExponentialHistogram.
    """

    SCALE: ClassVar[int] = 3
    PER_OCTAVE: ClassVar[int] = 8
    MIN_INDEX: ClassVar[int] = -160
    MAX_INDEX: ClassVar[int] = 96

    count: int = 0
    total: float = 0.0
    zero: int = 0
    over: int = 0
    buckets: dict[int, int] = {}

    def record(self, value: float, n: int = 1) -> None:
        """Add `n` observations of `value` (seconds). NaN, infinity and negative values raise ValueError."""
        if not 0.0 <= value < math.inf:
            raise ValueError(f"histogram value must be finite and not negative, got {value!r}")
        self.count += n
        self.total += value * n
        index = math.ceil(self.PER_OCTAVE * math.log2(value)) if value > 0.0 else self.MIN_INDEX
        if index <= self.MIN_INDEX:
            self.zero += n
        elif index > self.MAX_INDEX:
            self.over += n
        else:
            self.buckets[index] = self.buckets.get(index, 0) + n

    @classmethod
    def upper_bound(cls, index: int) -> float:
        """Upper edge of bucket `index`, in seconds."""
        return float(2.0 ** (index / cls.PER_OCTAVE))
