"""What a pool's first tokens take, over what the step model says: remembered tenant by tenant.

Layer: scheduling. Pure: the time is the caller's. A tenant's ratio is the median of its own latest, so that one odd
observation moves it no further than its neighbours; who has seen too little takes the weighted median of all tenants,
so that one tenant, however much it sends, moves no other's prediction by more than half of the weight. What is old is
forgotten: a slow spell must not refuse for ever those whose being served would show that it is over.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import median

import msgspec

REMEMBERED = 16
"""Observations of one tenant that its ratio looks back on."""
ENOUGH = 8
"""Observations with which a tenant is predicted by its own, and weighs in fully for others."""
DOUBTED = 4
"""With fewer of its own, a tenant's ratio is the median of these and of as many ones as are missing."""
FORGOTTEN_S = 300.0
MOST_TENANTS = 256
RATIO_BOUNDS = (0.05, 20.0)
"""What lies outside is no correction but a mistake: it is excluded."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Observed over predicted, as the median of its logarithm and the mean absolute deviation from that."""

    log: float = 0.0
    deviation: float = 0.0
    n: int = 0

    @property
    def value(self) -> float:
        return math.exp(self.log)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's ratios for one tenant, for prompts of which most is computed and of which most is cached."""

    pool: str
    computed: Ratio = Ratio()
    cached: Ratio = Ratio()

    def ratio(self, uncached: int, cached: int) -> Ratio:
        """The one for such a prompt, or the other while that has seen nothing."""
        mine, other = (self.cached, self.computed) if cached > uncached else (self.computed, self.cached)
        return mine if mine.n or not other.n else other


class Calibrator:
    """One pool's, at one gateway. Memory is bounded by MOST_TENANTS × REMEMBERED."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._computed, self._cached = _Ratios(), _Ratios()

    def of(self, tenant: str, now: float) -> Calibration:
        """What `tenant`'s requests are predicted with at `now`, in seconds of a clock that never goes back."""
        return Calibration(
            pool=self._pool, computed=self._computed.of(tenant, now), cached=self._cached.of(tenant, now)
        )

    def observed(
        self, tenant: str, modelled_s: float, observed_s: float, *, uncached: int, cached: int, now: float
    ) -> None:
        """One more request. `modelled_s` is what the step model says of the sizes that the engine counted; what makes
        no sense is left out (F22).
        """
        if not (0 < modelled_s < math.inf and 0 < observed_s < math.inf):
            return
        ratio = observed_s / modelled_s
        if RATIO_BOUNDS[0] <= ratio <= RATIO_BOUNDS[1]:
            (self._cached if cached > uncached else self._computed).add(tenant, math.log(ratio), now)


class _Ratios:
    """Logarithms of ratios by tenant, those who were silent longest first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, deque[tuple[float, float]]] = OrderedDict()
        self._own: dict[str, Ratio] = {}
        self._everyones = Ratio()

    def of(self, tenant: str, now: float) -> Ratio:
        if self._forget(now):
            self._everyones = _pooled(self._own.values())
        own = self._own.get(tenant)
        return own if own is not None and own.n >= ENOUGH else self._everyones

    def add(self, tenant: str, log: float, now: float) -> None:
        seen = self._seen.get(tenant)
        if seen is None:
            seen = self._seen[tenant] = deque(maxlen=REMEMBERED)
        seen.append((now, log))
        self._seen.move_to_end(tenant)
        if len(self._seen) > MOST_TENANTS:
            self._drop(next(iter(self._seen)))
        self._forget(now)
        self._own[tenant] = _ratio([log for _, log in seen])
        self._everyones = _pooled(self._own.values())

    def _forget(self, now: float) -> bool:
        """Whether anything was old. Who was silent longest comes first, so that the others need no look: what is old
        of a tenant that goes on being observed is overwritten.
        """
        before = len(self._seen)
        while self._seen:
            tenant, seen = next(iter(self._seen.items()))
            if now - seen[-1][0] <= FORGOTTEN_S:
                break
            self._drop(tenant)
        return len(self._seen) != before

    def _drop(self, tenant: str) -> None:
        del self._seen[tenant]
        self._own.pop(tenant, None)


def _ratio(logs: Sequence[float]) -> Ratio:
    """One tenant's: few observations are held against 1, which is no correction."""
    middle = median([*logs, *[0.0] * (DOUBTED - len(logs))])
    return Ratio(log=middle, deviation=_deviation(logs, middle), n=len(logs))


def _pooled(ratios: Iterable[Ratio]) -> Ratio:
    """The weighted median of tenants' ratios; halfway between two that split the weight evenly."""
    ordered = sorted(ratios, key=lambda each: each.log)
    if not ordered:
        return Ratio()
    weights = [min(each.n, ENOUGH) for each in ordered]
    reached, whole = list(accumulate(weights)), sum(weights)
    lower = next(each for each, sofar in zip(ordered, reached, strict=True) if 2 * sofar >= whole)
    upper = next(each for each, sofar in zip(ordered, reached, strict=True) if 2 * sofar > whole)
    middle = (lower.log + upper.log) / 2
    off = [abs(each.log - middle) + each.deviation for each in ordered]
    deviation = sum(weight * one for weight, one in zip(weights, off, strict=True)) / whole
    return Ratio(log=middle, deviation=deviation, n=sum(each.n for each in ordered))


def _deviation(logs: Sequence[float], middle: float) -> float:
    return sum(abs(log - middle) for log in logs) / len(logs)
