"""What an attempt cost: the price in force when its request arrived, by the formula that leases settle by.

Layer: service. Pure. Prices are data of the quotas domain and handed in. A cost is worked out once, when the attempt's
row is stored, and is a part of that row: no later price changes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.quotas import money
from controlplane.quotas.schemas import Price
from dataplane.protocol import UsageRecord

MOST = 1 << 50
"""Micro-units that one attempt costs at most, as leases count it."""


class PriceList:
    """Prices by pool, for many attempts."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._by_pool: dict[str, list[Price]] = {}
        for price in prices:
            self._by_pool.setdefault(price.pool, []).append(price)

    def cost(self, record: UsageRecord) -> int | None:
        """Whole micro-units, half to even; None when no price was in force when the request arrived."""
        known = (*self._by_pool.get(record.pool, ()), *self._by_pool.get("", ()))
        price = money.price_at(known, record.pool, record.started_at)
        if price is None:
            return None
        use = money.Use(
            uncached_input=record.prompt_tokens - record.cached_tokens,
            cached_input=record.cached_tokens,
            output=record.output_tokens,
            device_seconds=record.device_seconds,
        )
        return min(money.cost(price, use), MOST)
