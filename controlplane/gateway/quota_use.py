"""How much of each limit is used, as far as anybody can tell.

Layer: service. The store that all gateways share is asked first; what it has forgotten or cannot tell is summed from
the ledger where a day's or month's use is wanted, and is otherwise unknown with its reason: never a 0 that nobody knows
(F9). It takes nothing and hydrates nothing, but has a counter corrected that holds what nobody will settle.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from controlplane.admission.answers import Cold, ColdCounter, DoubtedCounter, OutsideWindows, Reserved, Standing
from controlplane.admission.charges import MOST_CHARGES, SIZES, Charge, Counter, Use, charges_for
from controlplane.admission.leases import Leases
from controlplane.admission.warm import Warmer
from controlplane.gateway.metering import LedgerSum
from controlplane.gateway.quotas import TenantLimits
from controlplane.quotas.limits import effective
from controlplane.quotas.schemas import Limit
from controlplane.tenants.schemas import KeyGrant

ROUNDS = 4
"""Windows moved on, counters found cold: no honest store needs more."""
SUM_S = 1.0
"""Longest wait for one sum of the ledger."""
SUMS_S = 2.5
"""Longest wait for all sums of one answer; those not begun by then count as away."""
SUMS_AT_ONCE = 3
"""Of the process's connections; the others are for keys, limits and the fleet."""
MOST_SUMS = 16
"""Sums of the ledger for one answer."""


class Source(enum.StrEnum):
    """Where a limit's use was read."""

    LIVE = "live"
    LEDGER = "ledger"
    """As last known: without what runs now."""
    REQUEST = "request"
    """Judged from each request alone; nothing adds up."""
    UNKNOWN = "unknown"


class Unknown(enum.StrEnum):
    """Why a use cannot be told."""

    REDIS_AWAY = "redis_away"
    LEDGER_AWAY = "ledger_away"
    TOO_MANY = "too_many_limits"


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one limit as of `as_of`, Unix seconds. `settled` is what ended requests used, `reserved` what running ones
    hold, None where nobody can tell; `total` is both. `resets_at` is the end of a calendar window, or when all of a
    sliding one will be free.
    """

    source: Source
    as_of: float
    total: int | None = None
    reserved: int | None = None
    resets_at: float | None = None
    why: Unknown | None = None

    @property
    def settled(self) -> int | None:
        return None if self.total is None or self.reserved is None else max(0, self.total - self.reserved)


class UseReader:
    """Reads the use of limits. `sum_ledger` sums one limit's window; whatever it raises means that it cannot tell."""

    def __init__(self, leases: Leases, sum_ledger: LedgerSum, *, wall: Callable[[], float] = time.time) -> None:
        self._slots = asyncio.Semaphore(SUMS_AT_ONCE)
        self._leases = leases
        self._sum = sum_ledger
        self._warmer = Warmer(leases)
        self._wall = wall

    async def of(self, grant: KeyGrant, tenant: TenantLimits, limits: Sequence[Limit]) -> dict[str, LimitUse]:
        """The use of each of `limits` by its id; at most one question to the store for 64 of them."""
        now = self._wall()
        found = {limit.quota_id: LimitUse(source=Source.REQUEST, as_of=now) for limit in limits if limit.kind in SIZES}
        counted = [limit for limit in limits if limit.kind not in SIZES]
        unsummed: dict[str, ColdCounter] = {}
        reserved = await self._leases.reserved(grant.tenant_id) if counted else None
        for begin in range(0, len(counted), MOST_CHARGES):
            some = counted[begin : begin + MOST_CHARGES]
            live, cold = await self._live(grant, tenant, some, reserved if isinstance(reserved, Reserved) else None)
            found |= live
            unsummed |= cold
        found |= await self._from_ledger(grant, tenant, unsummed)
        return found

    async def _live(
        self, grant: KeyGrant, tenant: TenantLimits, limits: Sequence[Limit], reserved: Reserved | None
    ) -> tuple[dict[str, LimitUse], dict[str, ColdCounter]]:
        """What the store knows, and the windows that the ledger must tell of."""
        now = self._wall()
        charges = _charges(grant, tenant, limits, now)
        cold: dict[str, ColdCounter] = {}

        def on_doubted(counter: DoubtedCounter) -> None:
            limit = tenant.limit(counter.charge.quota_id)
            self._warmer.doubt(grant.tenant_id, counter, lambda span: self._sum(grant, limit, span))

        for _ in range(ROUNDS):
            if not charges:
                return {}, cold
            outcome = await self._leases.standings(grant.tenant_id, charges, on_doubted)
            if isinstance(outcome, Cold):
                cold |= {one.charge.quota_id: one for one in outcome.counters}
                charges = tuple(charge for charge in charges if charge.quota_id not in cold)
            elif isinstance(outcome, OutsideWindows):
                now = outcome.now
                charges = _charges(grant, tenant, [one for one in limits if one.quota_id not in cold], now)
            elif isinstance(outcome, tuple):
                stood = zip(charges, outcome, strict=True)
                return {charge.quota_id: _standing(charge, one, reserved, now) for charge, one in stood}, cold
            else:
                break
        calendars = [charge for charge in charges if charge.counter is Counter.CALENDAR]
        away = LimitUse(source=Source.UNKNOWN, as_of=now, why=Unknown.REDIS_AWAY)
        unknown = {charge.quota_id: away for charge in charges if charge.counter is not Counter.CALENDAR}
        return unknown, cold | {charge.quota_id: _window(charge, now) for charge in calendars}

    async def _from_ledger(
        self, grant: KeyGrant, tenant: TenantLimits, counters: dict[str, ColdCounter]
    ) -> dict[str, LimitUse]:
        found, away, begun = {}, False, time.monotonic()
        for number, (quota_id, counter) in enumerate(counters.items()):
            now, resets_at = self._wall(), float(counter.stop)
            away = away or time.monotonic() - begun > SUMS_S
            why = Unknown.LEDGER_AWAY if away else Unknown.TOO_MANY if number >= MOST_SUMS else None
            if why is None:
                try:
                    async with asyncio.timeout(SUM_S), self._slots:
                        used, until = await self._sum(grant, tenant.limit(quota_id), counter)
                except Exception:  # whatever it was, the ledger did not tell
                    away, why = True, Unknown.LEDGER_AWAY
                else:
                    found[quota_id] = LimitUse(source=Source.LEDGER, as_of=until, total=used, resets_at=resets_at)
                    continue
            found[quota_id] = LimitUse(source=Source.UNKNOWN, as_of=now, why=why, resets_at=resets_at)
        return found


def _charges(grant: KeyGrant, tenant: TenantLimits, limits: Iterable[Limit], now: float) -> tuple[Charge, ...]:
    return charges_for(grant.tenant_id, limits, Use(), tenant.windows(now), lambda limit: effective(limit, now))


def _standing(charge: Charge, standing: Standing, reserved: Reserved | None, now: float) -> LimitUse:
    return LimitUse(
        source=Source.LIVE,
        as_of=now,
        total=standing.used,
        reserved=None if reserved is None else reserved.held(charge, now),
        resets_at=_reset(charge, now + standing.reset_s) if standing.reset_s else None,
    )


def _reset(charge: Charge, about: float) -> float:
    """When the counter resets, which is `about` then by two clocks: a calendar window ends at its own boundary."""
    if charge.counter is not Counter.CALENDAR:
        return about
    return float(min(charge.window, key=lambda boundary: abs(boundary - about)))


def _window(charge: Charge, now: float) -> ColdCounter:
    """The calendar window of `charge` that holds `now`."""
    first, middle, last = charge.window
    start, stop = (first, middle) if now < middle else (middle, last)
    return ColdCounter(charge=charge, start=start, stop=stop)
