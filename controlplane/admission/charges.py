"""What one request takes from each limit it must respect.

Layer: service. Pure: the same limits, estimate and windows give the same charges. It never asks a store and reads no
clock. Tokens and requests are counted in ones, money in whole micro-units.

Three counters carry every kind: a sliding minute (RATE), a calendar window (CALENDAR) and the set of live leases
(HELD). The sizes of one request, `max_prompt_tokens` and `max_output_tokens`, need no counter: see `oversized`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import msgspec

from controlplane.quotas.schemas import Away, Limit, QuotaKind, QuotaLevel

MOST = 1 << 50
"""No amount and no limit is larger, so that every sum in the store is an exact double."""
MOST_CHARGES = 64
"""Limits one request may have to respect."""

Effective = Callable[[Limit], tuple[int | None, int | None]]
"""A limit's soft and hard amounts in force now."""


class Counter(enum.IntEnum):
    """How units are counted in the store; the numbers are those of lua/core.lua."""

    RATE = 1
    CALENDAR = 2
    HELD = 3


COUNTERS = {
    QuotaKind.REQUESTS_PER_MINUTE: Counter.RATE,
    QuotaKind.TOKENS_PER_MINUTE: Counter.RATE,
    QuotaKind.INPUT_TOKENS_PER_MINUTE: Counter.RATE,
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: Counter.RATE,
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: Counter.RATE,
    QuotaKind.CONCURRENT_REQUESTS: Counter.HELD,
    QuotaKind.TOKENS_PER_DAY: Counter.CALENDAR,
    QuotaKind.TOKENS_PER_MONTH: Counter.CALENDAR,
    QuotaKind.MONEY_PER_DAY: Counter.CALENDAR,
    QuotaKind.MONEY_PER_MONTH: Counter.CALENDAR,
}
DAILY = frozenset({QuotaKind.TOKENS_PER_DAY, QuotaKind.MONEY_PER_DAY})
MONEY = frozenset({QuotaKind.MONEY_PER_DAY, QuotaKind.MONEY_PER_MONTH})
SIZES = frozenset({QuotaKind.MAX_PROMPT_TOKENS, QuotaKind.MAX_OUTPUT_TOKENS})


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may use at worst, what more it wants, or what it did use. Money in micro-units.

    Raises ValueError for what is negative, above `MOST`, or more uncached input than input.
    """

    requests: int = 1
    input: int = 0
    uncached_input: int = 0
    output: int = 0
    money: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.uncached_input <= self.input <= MOST and 0 <= self.output <= MOST):
            self._refuse()
        if not (0 <= self.requests <= MOST and 0 <= self.money <= MOST):
            self._refuse()

    def _refuse(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be from 0 to {MOST}")
        if self.uncached_input > self.input:
            raise ValueError("uncached_input cannot be more than input")

    def units(self, kind: QuotaKind) -> int:
        """What counts against a limit of `kind`."""
        return _UNITS[kind](self)


NOTHING = Use(requests=0)
"""What never ran has used nothing."""

_UNITS: dict[QuotaKind, Callable[[Use], int]] = {
    QuotaKind.REQUESTS_PER_MINUTE: lambda use: use.requests,
    QuotaKind.TOKENS_PER_MINUTE: lambda use: use.input + use.output,
    QuotaKind.INPUT_TOKENS_PER_MINUTE: lambda use: use.input,
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: lambda use: use.uncached_input,
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: lambda use: use.output,
    QuotaKind.CONCURRENT_REQUESTS: lambda use: min(1, use.requests),
    QuotaKind.TOKENS_PER_DAY: lambda use: use.input + use.output,
    QuotaKind.TOKENS_PER_MONTH: lambda use: use.input + use.output,
    QuotaKind.MONEY_PER_DAY: lambda use: use.money,
    QuotaKind.MONEY_PER_MONTH: lambda use: use.money,
    QuotaKind.MAX_PROMPT_TOKENS: lambda use: use.input,
    QuotaKind.MAX_OUTPUT_TOKENS: lambda use: use.output,
}


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """Boundaries of this calendar window and the next in the tenant's time zone, Unix seconds: start, middle, end."""

    day: tuple[int, int, int]
    month: tuple[int, int, int]

    def of(self, kind: QuotaKind) -> tuple[int, int, int]:
        return self.day if kind in DAILY else self.month


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """`amount` units of one limit. `key` names its counter in the store, for the tenant as a whole.

    `soft` and `hard` are the amounts in force now, None for none. `window` is of CALENDAR counters. `away` and `local`
    are the limit's own.
    """

    key: str
    quota_id: str
    level: QuotaLevel
    kind: QuotaKind
    counter: Counter
    amount: int
    soft: int | None
    hard: int | None
    window: tuple[int, int, int] = (0, 0, 0)
    away: Away = Away.CLOSED
    local: int = 0

    def start(self, at: float) -> int:
        """Start of the calendar window that holds `at`, Unix seconds; 0 for other counters."""
        first, middle, _ = self.window
        return middle if at >= middle else first


class Oversize(msgspec.Struct, frozen=True, kw_only=True):
    """One request alone is larger than a limit allows; with `hard` False it passes with a warning."""

    quota_id: str
    level: QuotaLevel
    kind: QuotaKind
    amount: int
    limit: int
    hard: bool


def declared(limit: Limit) -> tuple[int | None, int | None]:
    """The limit as it is written down, without temporary raises."""
    return limit.soft, limit.hard


def tenant_key(tenant_id: str, name: str) -> str:
    """A key of the tenant's; all of them lie in one slot of a cluster. Raises ValueError for an id it cannot hold."""
    if not tenant_id or "{" in tenant_id or "}" in tenant_id:
        raise ValueError("a tenant's id must not be empty nor hold braces")
    return f"tidegate:{{{tenant_id}}}:{name}"


def charges_for(
    tenant_id: str, limits: Iterable[Limit], use: Use, windows: Windows, effective: Effective = declared
) -> tuple[Charge, ...]:
    """One charge for each limit that has a counter. Raises ValueError beyond `MOST_CHARGES`."""
    found = tuple(_charge(tenant_id, limit, use, windows, effective) for limit in limits if limit.kind not in SIZES)
    if len(found) > MOST_CHARGES:
        raise ValueError(f"a request cannot respect more than {MOST_CHARGES} limits")
    return found


def _charge(tenant_id: str, limit: Limit, use: Use, windows: Windows, effective: Effective) -> Charge:
    soft, hard = effective(limit)
    counter = COUNTERS[limit.kind]
    return Charge(
        key=tenant_key(tenant_id, f"{limit.level.value}:{limit.scope_id}:{limit.kind.value}:{limit.model}"),
        quota_id=limit.quota_id,
        level=limit.level,
        kind=limit.kind,
        counter=counter,
        amount=use.units(limit.kind),
        soft=soft,
        hard=None if hard is None else min(hard, MOST),
        window=windows.of(limit.kind) if counter is Counter.CALENDAR else (0, 0, 0),
        away=limit.away,
        local=limit.local,
    )


def oversized(limits: Iterable[Limit], use: Use, effective: Effective = declared) -> tuple[Oversize, ...]:
    """The size limits that `use` exceeds, hard ones first."""
    found = []
    for limit in limits:
        if limit.kind not in SIZES:
            continue
        soft, hard = effective(limit)
        amount = use.units(limit.kind)
        broken = hard if hard is not None and amount > hard else soft if soft is not None and amount > soft else None
        if broken is not None:
            found.append(
                Oversize(
                    quota_id=limit.quota_id,
                    level=limit.level,
                    kind=limit.kind,
                    amount=amount,
                    limit=broken,
                    hard=broken == hard,
                )
            )
    return tuple(sorted(found, key=lambda one: not one.hard))
