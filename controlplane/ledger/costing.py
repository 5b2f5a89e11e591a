"""What usage cost: the price in force when an attempt finished, applied to exact sums.

Layer: service. Pure. Prices are data of the quotas domain and handed in; so may be the formula. Within one segment of
time a pool has one price, so a price times a sum is the sum of what the attempts cost, and is rounded once, half to
even, to whole micro-units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Protocol

from controlplane.ledger.spans import Segment
from controlplane.quotas.schemas import Price

_MILLION = Decimal(1_000_000)


class CostFunction(Protocol):
    """Whole micro-units for what was used at one price."""

    def __call__(
        self, price: Price, *, uncached_tokens: int, cached_tokens: int, output_tokens: int, device_seconds: Decimal
    ) -> int: ...


def cost(price: Price, *, uncached_tokens: int, cached_tokens: int, output_tokens: int, device_seconds: Decimal) -> int:
    """Token prices are per million tokens, the device's is per second; all in micro-units."""
    tokens = uncached_tokens * price.uncached_input + cached_tokens * price.cached_input + output_tokens * price.output
    exact = Decimal(tokens) / _MILLION + device_seconds * price.device_second
    return int(exact.to_integral_value(ROUND_HALF_EVEN))


def in_force(prices: Iterable[Price], pool: str, at: float) -> Price | None:
    """The price of `pool` at `at` (Unix seconds): its own before that of every pool, the newest of several."""
    found = [
        price
        for price in prices
        if price.pool in (pool, "") and price.valid_from <= at and (price.valid_until is None or at < price.valid_until)
    ]
    return max(found, key=lambda price: (price.pool == pool, price.valid_from), default=None)


def cut(segment: Segment, prices: Sequence[Price]) -> list[Segment]:
    """`segment` in pieces, in order, within each of which no price changes."""
    moments = {price.valid_from for price in prices} | {
        price.valid_until for price in prices if price.valid_until is not None
    }
    first = segment.since.timestamp()
    last = float("inf") if segment.until is None else segment.until.timestamp()
    inside = [datetime.fromtimestamp(moment, UTC) for moment in sorted(moments) if first < moment < last]
    edges = [segment.since, *inside]
    return [Segment(since, until) for since, until in zip(edges, [*inside, segment.until], strict=True)]


def price_of(prices: Iterable[Price], pool: str, piece: Segment) -> Price | None:
    """The one price of `pool` within a piece of `cut`."""
    length = timedelta(seconds=1) if piece.until is None else piece.until - piece.since
    return in_force(prices, pool, (piece.since + length / 2).timestamp())


class Used(Protocol):
    """A sum of attempts."""

    @property
    def uncached_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def device_seconds(self) -> Decimal: ...


def price_sum(used: Used, price: Price, formula: CostFunction) -> int:
    """What a sum of attempts at one price cost, in micro-units."""
    return formula(
        price,
        uncached_tokens=used.uncached_tokens,
        cached_tokens=used.cached_tokens,
        output_tokens=used.output_tokens,
        device_seconds=used.device_seconds,
    )
