"""How often one key and one tenant may ask something that is not inference.

Layer: service. Counted in this process alone, in bounded memory; it protects the gateway, and promises nobody anything.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from controlplane.errors import RateLimitedError

MOST_KNOWN = 20_000


class Ration:
    """`burst` at once and `per_s` on the long run, for each name; of more than `MOST_KNOWN` the oldest is forgotten."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, name: str) -> None:
        """One question of `name`. Raises RateLimitedError (429) that says exactly when the next may be asked."""
        now = self._clock()
        left, at = self._left.pop(name, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_s)
        refused = left < 1.0
        self._left[name] = (left if refused else left - 1.0, now)
        if len(self._left) > MOST_KNOWN:
            self._left.popitem(last=False)
        if refused:
            seconds = max(1, math.ceil((1.0 - left) / self._per_s))
            raise RateLimitedError(
                f"Too many questions about quotas; ask again in {seconds} s.",
                code="quota_api_rate_exceeded",
                headers={"retry-after": str(seconds)},
            )
