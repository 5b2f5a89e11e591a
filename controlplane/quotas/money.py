"""What an attempt costs, in whole micro-units of the deployment's currency.

Layer: service. Pure. Every sum is one of integers and rounded once, at its end: up where money is reserved, so that a
reservation covers the settlement at the same price, and half to even where it is settled, so that many attempts
together are not biased. Device time is taken in whole nanoseconds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import msgspec

from controlplane.quotas.schemas import Price

NANOSECONDS = 1_000_000_000
TOKENS_PRICED = 1_000_000
"""Token prices are per this many tokens."""


class Rounding(enum.StrEnum):
    """How the one division at the end of a cost is rounded."""

    UP = "up"
    HALF_EVEN = "half_even"


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt used: tokens, and seconds of device time, none of them negative."""

    uncached_input: int = 0
    cached_input: int = 0
    output: int = 0
    device_seconds: float = 0.0


def cost(price: Price | None, use: Use, rounding: Rounding = Rounding.HALF_EVEN) -> int:
    """Micro-units that `use` costs; nothing without a price. Raises ValueError for what no engine can have used."""
    device_ns = _nanoseconds(use.device_seconds)
    if min(use.uncached_input, use.cached_input, use.output, device_ns) < 0:
        raise ValueError("what was used cannot be negative")
    if price is None:
        return 0
    tokens = (
        use.uncached_input * price.uncached_input + use.cached_input * price.cached_input + use.output * price.output
    )
    # Both parts over one denominator: per million tokens, and per thousand million nanoseconds.
    return _divide(tokens * (NANOSECONDS // TOKENS_PRICED) + device_ns * price.device_second, NANOSECONDS, rounding)


def price_at(prices: Iterable[Price], pool: str, at: float) -> Price | None:
    """The price of `pool` in force at `at` (Unix seconds), else that of every pool, else None: it is free."""
    everywhere = None
    for price in prices:
        if price.valid_from <= at and (price.valid_until is None or at < price.valid_until):
            if price.pool == pool:
                return price
            if price.pool == "":
                everywhere = price
    return everywhere


def settled(prices: Iterable[Price], pool: str, arrived_at: float, use: Use) -> int:
    """What an attempt costs whose request arrived at `arrived_at`: the price in force then, half to even."""
    return cost(price_at(prices, pool, arrived_at), use)


def reserved(prices: Sequence[Price], pools: Iterable[str], at: float, use: Use) -> int:
    """The most that `use` can cost on any of `pools`, rounded up: for a request whose pool is not chosen yet.

    Input counted as uncached is taken at the dearer of the two input prices, because it may turn out to be cached.
    """
    most = 0
    for pool in pools:
        price = price_at(prices, pool, at)
        if price is not None:
            dearer = max(price.uncached_input, price.cached_input)
            worst = msgspec.structs.replace(price, uncached_input=dearer)
            most = max(most, cost(worst, use, Rounding.UP))
    return most


def _divide(amount: int, by: int, rounding: Rounding) -> int:
    whole, rest = divmod(amount, by)
    if rounding is Rounding.UP:
        return whole + (rest > 0)
    return whole + (2 * rest > by or (2 * rest == by and whole % 2 == 1))


def _nanoseconds(seconds: float) -> int:
    if not math.isfinite(seconds):
        raise ValueError("device time must be a finite number of seconds")
    return round(seconds * NANOSECONDS)
