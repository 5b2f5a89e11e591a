"""Each tenant's limits as this gateway last read them.

Layer: service. How long they are believed is `PolicyCache`'s. What Postgres cannot tell anew goes on as last known, a
change that was announced meanwhile too; a tenant whose limits were never read is refused with 503, never taken for one
without limits. It must never count anything.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Self

import msgspec

from controlplane.admission.charges import MONEY, SIZES, Charge, Use, Windows, charges_for
from controlplane.gateway.cache import PolicyCache
from controlplane.gateway.errors import capacity as out_of_capacity
from controlplane.gateway.policy import PolicyChange
from controlplane.quotas import windows
from controlplane.quotas.limits import LimitIndex, effective, next_change
from controlplane.quotas.schemas import Limit, TenantQuotas
from controlplane.tenants.schemas import KeyGrant

CAPACITY = 10_000
"""Tenants known."""
MOST_FOUND = 1024
"""Combinations of project, key and model whose limits a tenant keeps at hand."""

LoadQuotas = Callable[[str], Awaitable[TenantQuotas | None]]


class RequestLimits(tuple[Limit, ...]):
    """The limits that one request must respect, and what is asked of them for each."""

    sizes: tuple[Limit, ...]
    """Those on what one request may be: they need no counter."""
    of_money: bool
    """Whether one of them counts money."""

    def __new__(cls, limits: Iterable[Limit]) -> Self:
        made = super().__new__(cls, limits)
        made.sizes = tuple(limit for limit in made if limit.kind in SIZES)
        made.of_money = any(limit.kind in MONEY for limit in made)
        return made


class _Charges(NamedTuple):
    """The charges of `limits` without amounts, as they are from `since` until before `until`, Unix seconds."""

    limits: tuple[Limit, ...]
    since: float
    until: float
    charges: tuple[Charge, ...]


class TenantLimits:
    """One tenant's quotas, ready to be asked for one request."""

    __slots__ = ("_by_id", "_charges", "_found", "_index", "_windows", "_windows_end", "_windows_start", "quotas")

    def __init__(self, quotas: TenantQuotas) -> None:
        self.quotas = quotas
        self._index = LimitIndex(quotas)
        self._by_id = {limit.quota_id: limit for limit in quotas.limits}
        self._found: dict[tuple[str, str, str], RequestLimits] = {}
        self._charges: dict[int, _Charges] = {}
        """By the identity of a tuple of limits, which each entry keeps alive."""
        self._windows: Windows | None = None
        self._windows_start = self._windows_end = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TenantLimits) and self.quotas == other.quotas

    __hash__ = None  # type: ignore[assignment]  # compared, never a key

    def limits_for(self, grant: KeyGrant, model: str) -> RequestLimits:
        """Every limit that a request of this key for `model` must respect."""
        name = (grant.project_id, grant.identity, model)
        found = self._found.get(name)
        if found is None:
            if len(self._found) >= MOST_FOUND:
                self._found.clear()
                self._charges.clear()
            found = self._found[name] = RequestLimits(
                self._index.limits_for(project_id=grant.project_id, identity=grant.identity, model=model)
            )
        return found

    def charges(self, limits: tuple[Limit, ...], use: Use, at: float) -> tuple[Charge, ...]:
        """What a request of these limits (of `limits_for`) takes at `at`, Unix seconds. What does not depend on the
        request is kept until a window or a raise begins or ends.
        """
        known = self._charges.get(id(limits))
        if known is None or known.limits is not limits or not known.since <= at < known.until:
            found = charges_for(
                self.quotas.tenant_id, limits, use, self.windows(at), lambda limit: effective(limit, at)
            )
            edge = next_change(limits, at)
            until = self._windows_end if edge is None else min(self._windows_end, edge)
            known = self._charges[id(limits)] = _Charges(limits, at, until, found)
        return tuple([msgspec.structs.replace(one, amount=use.units(one.kind)) for one in known.charges])

    def limit(self, quota_id: str) -> Limit:
        """The limit of this id. Raises KeyError."""
        return self._by_id[quota_id]

    def windows(self, at: float) -> Windows:
        """The calendar windows that hold `at`, Unix seconds, in the tenant's time zone."""
        if self._windows is None or not self._windows_start <= at < self._windows_end:
            day, month = windows.day(self.quotas.time_zone, at), windows.month(self.quotas.time_zone, at)
            self._windows = Windows(
                day=(day.start, day.end, day.next_end), month=(month.start, month.end, month.next_end)
            )
            self._windows_start, self._windows_end = day.start, day.end
        return self._windows


class QuotaDirectory:
    """Limits by tenant id. `load` reads one tenant's: None when there is no such tenant, any exception when Postgres
    cannot answer. `on_learned` is called whenever known ones came or changed.
    """

    def __init__(
        self,
        load: LoadQuotas,
        *,
        on_learned: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load_quotas = load
        self.cache = PolicyCache(
            self._load,
            noun="Quotas",
            busy_code="quota_lookups_busy",
            capacity=CAPACITY,
            keeps_changed=True,
            on_learned=on_learned,
            clock=clock,
        )
        self.on_listening = self.cache.on_listening
        self.on_silence = self.cache.on_silence
        self.close = self.cache.close

    async def of(self, tenant_id: str) -> TenantLimits:
        """The tenant's limits. Raises CapacityError (503) when nobody can tell them."""
        limits = await self.cache.get(tenant_id)
        if limits is None:
            raise out_of_capacity("The tenant's quotas are not known; try again.", "policy_unavailable")
        return limits

    def known(self) -> list[TenantQuotas]:
        """The quotas of every cached tenant, most recently used last."""
        return [limits.quotas for limits in self.cache.known()]

    def adopt(self, quotas: Iterable[TenantQuotas]) -> None:
        """Take quotas of an earlier run: used only while Postgres cannot answer."""
        for one in quotas:
            self.cache.adopt(one.tenant_id, TenantLimits(one))

    def on_change(self, change: PolicyChange) -> None:
        """A committed change of limits, raises, time zones or prices; an empty id means any row."""
        if change.table in {"quotas", "quota_grants", "tenants"} and change.id:
            self.cache.invalidate(change.id)
        elif change.table in {"quotas", "quota_grants", "tenants", "prices"}:
            self.cache.invalidate_where(lambda _: True)

    async def _load(self, tenant_id: str) -> TenantLimits | None:
        quotas = await self._load_quotas(tenant_id)
        return None if quotas is None else TenantLimits(quotas)
