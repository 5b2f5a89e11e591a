"""The places of one gateway's line: whether it is full for a newcomer, and when who found it full should come back.

Layer: scheduling. Pure: times are handed in (seconds on one clock). Each lane is a room, and each tenant's part of it
one more; `retry` estimates the waits from how fast they empty and keeps places for those who come back as told.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from random import Random

import msgspec

from controlplane.admission.bands import Band, Lane
from controlplane.admission.policy import Queued, QueueLimits
from controlplane.admission.retry import Asker, Comebacks

MOST_TENANTS = 1024
"""Tenants whose pace in a lane is remembered."""


class Places:
    """`stood` and `left` are told of each that waits; memory is bounded by `limits` and MOST_TENANTS."""

    def __init__(self, limits: QueueLimits, rng: Random) -> None:
        self._limits = limits
        self._rng = rng
        self._lanes = {lane: Comebacks(limits.of(lane), rng) for lane in Lane}
        self._parts: OrderedDict[tuple[Lane, str], Comebacks] = OrderedDict()
        self._tenants: dict[Lane, Counter[str]] = {lane: Counter() for lane in Lane}
        self._bands: dict[Lane, Counter[Band]] = {lane: Counter() for lane in Lane}
        self._counts: Counter[Lane] = Counter()

    def stood(self, queued: Queued) -> None:
        """One more waits."""
        lane, tenant = queued.lane, queued.tenant
        self._tenants[lane][tenant] += 1
        self._bands[lane][queued.band] += 1
        self._counts[lane] += 1
        self._part(lane, tenant)

    def left(self, queued: Queued, now: float) -> None:
        """One waits no more, however that ended."""
        lane, tenant = queued.lane, queued.tenant
        self._tenants[lane][tenant] -= 1
        if not self._tenants[lane][tenant]:
            del self._tenants[lane][tenant]
        self._bands[lane][queued.band] -= 1
        self._counts[lane] -= 1
        self._lanes[lane].ended(now)
        self._part(lane, tenant).ended(now)

    def full_for(self, tenant: str, lane: Lane, band: Band, weights: Mapping[str, float]) -> str | None:
        """The code of a refusal that is certain: no place is free and the newcomer is whom the policy would shed."""
        if any(count and later > band for later, count in self._bands[lane].items()):
            return None
        standing = self._tenants[lane]
        if standing[tenant] >= self._limits.tenant:
            return "tenant_queue_full"
        places = self._limits.of(lane)
        if self._counts[lane] < places:
            return None
        weight = weights.get(tenant, 1.0)
        total = sum(weights.get(name, 1.0) for name in standing) + (0.0 if tenant in standing else weight)
        return "queue_full" if standing[tenant] + 1 > places * weight / total else None

    def limits_for(self, tenant: str, asker: Asker, lane: Lane, now: float) -> QueueLimits:
        """The limits for a newcomer of `tenant`, `asker`: without the places kept for others who are due."""
        count, own = self._counts[lane], self._tenants[lane][tenant]
        short, long, part = self._limits.short, self._limits.long, self._limits.tenant
        if not self._lanes[lane].admits(asker, count, now):
            short, long = (min(short, count), long) if lane is Lane.SHORT else (short, min(long, count))
        elif not self._part(lane, tenant).admits(asker, own, now):
            part = min(part, own)
        return msgspec.structs.replace(self._limits, short=short, long=long, tenant=part)

    def refuse(self, code: str, tenant: str, asker: Asker, lane: Lane, now: float) -> int:
        """Whole seconds after which `asker` who was refused now with `code` should come back."""
        if code == "tenant_queue_full":
            return self._part(lane, tenant).refuse(asker, now)
        waiting = self._counts[lane] if code == "queue_wait_exceeded" else 0
        return self._lanes[lane].refuse(asker, now, waiting=waiting)

    def _part(self, lane: Lane, tenant: str) -> Comebacks:
        name = (lane, tenant)
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = Comebacks(self._limits.tenant, self._rng)
            if len(self._parts) > MOST_TENANTS:
                self._parts.popitem(last=False)
        else:
            self._parts.move_to_end(name)
        return found
