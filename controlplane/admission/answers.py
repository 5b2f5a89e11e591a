"""What taking, keeping and ending a lease is answered with.

Layer: service. Torch-free, frozen data. Times are Unix seconds by the store's clock, waits are seconds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import msgspec

from controlplane.admission.charges import Charge, Counter
from controlplane.quotas.schemas import QuotaKind, QuotaLevel


class Basis(enum.StrEnum):
    """Who counted: the store that all gateways share, or this process while the store was away."""

    STORE = "store"
    LOCAL = "local"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one request holds. `fence` grows with every lease of the tenant; `step` names its last extension."""

    lease_id: str
    tenant_id: str
    charges: tuple[Charge, ...]
    basis: Basis
    fence: int
    epoch: int
    """Which store it was taken from: another one after the store was lost."""
    taken_at: float
    expires_at: float
    ttl_s: float
    step: int = 0


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One limit after the answer. `remaining` is None for a limit that only warns; `reset_s` is when all of it is free
    again, None for limits that have no such time.
    """

    quota_id: str
    level: QuotaLevel
    kind: QuotaKind
    limit: int | None
    used: int
    remaining: int | None
    reset_s: float | None


class SoftLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A warning: `used` is above `soft`."""

    quota_id: str
    level: QuotaLevel
    kind: QuotaKind
    used: int
    soft: int


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant's live leases hold: units by counter key and by the start of its calendar window, 0 for other
    counters. `units` is None when there are too many `leases` to sum.
    """

    leases: int
    units: dict[tuple[str, int], int] | None

    def held(self, charge: Charge, at: float) -> int | None:
        """Units of one limit in the window that holds `at`; None when they are too many to sum."""
        return None if self.units is None else self.units.get((charge.key, charge.start(at)), 0)


class DoubtedCounter(msgspec.Struct, frozen=True, kw_only=True):
    """A calendar counter with units of leases that expired long ago without an end: once the ledger has all of
    [`start`, `since`), correct it by that sum. Until then it counts them as used.
    """

    charge: Charge
    start: int
    since: float


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`repeated`: this very call was answered before, and nothing was taken again. `uncounted` names the quotas that
    let it pass because the store is away.
    """

    lease: Lease
    standings: tuple[Standing, ...]
    warnings: tuple[SoftLimit, ...] = ()
    repeated: bool = False
    uncounted: tuple[str, ...] = ()
    doubted: tuple[DoubtedCounter, ...] = ()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One limit that is in the way. `retry_after_s` is None when waiting cannot help; it is exact for windows and an
    estimate for concurrency. `away` says that the limit refuses because the store cannot be asked.
    """

    quota_id: str
    level: QuotaLevel
    kind: QuotaKind
    limit: int
    used: int
    amount: int
    retry_after_s: float | None
    exact: bool
    away: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing was taken. The refusal with the longest wait comes first."""

    refusals: tuple[Refusal, ...]
    standings: tuple[Standing, ...]
    doubted: tuple[DoubtedCounter, ...] = ()

    @property
    def never(self) -> bool:
        """Waiting cannot help: the request alone is larger than a limit."""
        return any(one.retry_after_s is None for one in self.refusals)

    @property
    def retry_after_s(self) -> float | None:
        """After so long the same request passes if nobody else takes it; None for never."""
        return None if self.never else max(one.retry_after_s or 0.0 for one in self.refusals)

    @property
    def exact(self) -> bool:
        return all(one.exact for one in self.refusals)

    @property
    def away(self) -> bool:
        """The store is away and a limit is declared closed: the deployment's fault, not the tenant's (503)."""
        return any(one.away for one in self.refusals)


class ColdCounter(msgspec.Struct, frozen=True, kw_only=True):
    """A calendar counter that does not know its window's use: sum the ledger for [`start`, `stop`) and hydrate it."""

    charge: Charge
    start: int
    stop: float


class Cold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing was taken. `now` is the server's time."""

    tenant_id: str
    counters: tuple[ColdCounter, ...]
    now: float


class OutsideWindows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing was taken: the server's time `now` lies in neither calendar window; compute them for it, once."""

    now: float


class Ending(enum.StrEnum):
    """Why a lease cannot be used."""

    SETTLED = "settled"
    EXPIRED = "expired"
    FENCED = "fenced"
    """Another holder has it since."""
    LOST = "lost"
    """The store was lost; reassert it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing was changed."""

    why: Ending


class Unavailable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The store did not answer in time."""


class Overrun(msgspec.Struct, frozen=True, kw_only=True):
    """What was used above the reservation, and charged all the same."""

    quota_id: str
    kind: QuotaKind
    units: int


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The lease is over. `late`: it had expired before. `deferred`: the store is away, and will be told when it is
    back.
    """

    overruns: tuple[Overrun, ...] = ()
    repeated: bool = False
    late: bool = False
    deferred: bool = False


class Holding(enum.StrEnum):
    """What became of a lease that was said to be still held."""

    KEPT = "kept"
    REVIVED = "revived"
    RECREATED = "recreated"
    SETTLED = "settled"
    EXPIRED = "expired"
    FENCED = "fenced"


class Reasserted(msgspec.Struct, frozen=True, kw_only=True):
    lease: Lease
    state: Holding


HELD_ON = frozenset({Holding.KEPT, Holding.REVIVED, Holding.RECREATED})

Acquired = Granted | Refused | Cold | OutsideWindows | Ended
Extended = Granted | Refused | Cold | OutsideWindows | Ended


def standing_of(charge: Charge, used: int, reset_s: float) -> Standing:
    return Standing(
        quota_id=charge.quota_id,
        level=charge.level,
        kind=charge.kind,
        limit=charge.hard,
        used=used,
        remaining=None if charge.hard is None else max(0, charge.hard - used),
        reset_s=None if charge.counter is Counter.HELD else reset_s,
    )


def soft_warnings(charges: Sequence[Charge], used: Iterable[int]) -> tuple[SoftLimit, ...]:
    return tuple(
        SoftLimit(quota_id=charge.quota_id, level=charge.level, kind=charge.kind, used=units, soft=charge.soft)
        for charge, units in zip(charges, used, strict=True)
        if charge.soft is not None and units > charge.soft
    )


def refused(
    refusals: Iterable[Refusal], standings: tuple[Standing, ...], doubted: tuple[DoubtedCounter, ...] = ()
) -> Refused:
    """The longest wait first, never before all."""
    by_wait = sorted(refusals, key=lambda one: math.inf if one.retry_after_s is None else one.retry_after_s)
    return Refused(refusals=tuple(reversed(by_wait)), standings=standings, doubted=doubted)


_REQUESTS = frozenset({QuotaKind.REQUESTS_PER_MINUTE})
_TOKENS = frozenset(
    {
        QuotaKind.TOKENS_PER_MINUTE,
        QuotaKind.INPUT_TOKENS_PER_MINUTE,
        QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE,
        QuotaKind.OUTPUT_TOKENS_PER_MINUTE,
        QuotaKind.TOKENS_PER_DAY,
        QuotaKind.TOKENS_PER_MONTH,
    }
)


def ratelimit_headers(standings: Iterable[Standing]) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` of the tightest limit of each; reset in whole seconds."""
    requests: Standing | None = None
    tokens: Standing | None = None
    for one in standings:
        if one.remaining is None:
            continue
        if one.kind in _REQUESTS:
            requests = one if requests is None or one.remaining < (requests.remaining or 0) else requests
        elif one.kind in _TOKENS:
            tokens = one if tokens is None or one.remaining < (tokens.remaining or 0) else tokens
    headers: dict[str, str] = {}
    for name, tightest in (("requests", requests), ("tokens", tokens)):
        if tightest is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(tightest.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(tightest.remaining)
            headers[f"x-ratelimit-reset-{name}"] = str(math.ceil(tightest.reset_s or 0.0))
    return headers
