"""Counting for this process alone while the store is away: the limits that declare `local`.

Layer: service. The rules are the store's (lua/core.lua): a sliding minute that keeps a second's units for 61 seconds,
calendar windows, and live leases. A count outlives the outage, so that a store which comes and goes lets nobody have
`local` anew: what was admitted here is counted here until it ends, also when the store counts it too by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from controlplane.admission.answers import Refusal
from controlplane.admission.charges import Charge, Counter, Use

SPAN_S = 61
MOST_COUNTERS = 10_000
MOST_LEASES = 100_000
RETRY_S = 2.0
"""When to ask again while nobody knows when the store is back."""


@dataclass(slots=True)
class Minute:
    """Units by second; a second counts until every unit in it is older than a minute."""

    total: int = 0
    seconds: dict[int, int] = field(default_factory=dict)

    def prune(self, second: int) -> None:
        for bucket in list(self.seconds):
            if bucket > second - SPAN_S:
                break
            self.total -= self.seconds.pop(bucket)

    def add(self, second: int, units: int) -> None:
        self.seconds[second] = self.seconds.get(second, 0) + units
        self.total += units

    def lower(self, second: int, units: int) -> None:
        lowered = min(units, self.seconds.get(second, 0))
        if lowered:
            self.seconds[second] -= lowered
            self.total -= lowered

    def wait_s(self, need: int, now: float) -> float:
        """Seconds until `need` units have left."""
        freed = 0
        for bucket, units in self.seconds.items():
            freed += units
            if freed >= need:
                return bucket + SPAN_S - now
        return float(SPAN_S)


@dataclass(slots=True)
class _Counter:
    """One limit's count in this process; only the part of its kind is used."""

    minute: Minute = field(default_factory=Minute)
    windows: dict[int, int] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)

    def is_idle(self, second: int, wall: float) -> bool:
        self.minute.prune(second)
        self.expire(second)
        return not self.minute.seconds and not self.held and all(start < wall - 40 * 86400 for start in self.windows)

    def expire(self, now: float) -> None:
        for lease_id in [name for name, expires in self.held.items() if expires <= now]:
            del self.held[lease_id]


@dataclass(slots=True)
class _Part:
    charge: Charge
    place: int


@dataclass(slots=True)
class _Taken:
    expires: float
    parts: list[_Part]


class LocalCounters:
    """`monotonic` and `wall` are clocks in seconds; calendar windows follow `wall`, all else `monotonic`."""

    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._counters: dict[str, _Counter] = {}
        self._leases: dict[str, _Taken] = {}

    def take(self, lease_id: str, charges: Sequence[Charge], ttl_s: float) -> tuple[Refusal, ...]:
        """Count all charges and answer nothing, or count none and answer what refuses."""
        now = self._monotonic()
        if not self._room(charges, now):
            return tuple(_refusal(charge, 0, RETRY_S) for charge in charges)
        refusals = [refusal for charge in charges if (refusal := self._judge(charge, now)) is not None]
        if not refusals:
            self._count(lease_id, charges, now, ttl_s)
        return tuple(refusals)

    def used(self, charge: Charge) -> int:
        """What this process has counted against the limit in its window now."""
        counter = self._counters.get(charge.key)
        return 0 if counter is None else self._used(counter, charge, self._monotonic())

    def settle(self, lease_id: str, use: Use) -> None:
        """Free the slots, and of what was counted the part that was not used. Does nothing for an unknown lease."""
        taken = self._leases.pop(lease_id, None)
        if taken is None:
            return
        by_key: dict[str, list[_Part]] = {}
        for part in taken.parts:
            by_key.setdefault(part.charge.key, []).append(part)
        for parts in by_key.values():
            used = use.units(parts[0].charge.kind)
            unused = sum(part.charge.amount for part in parts) - used
            for part in reversed(parts):
                lowered = max(0, min(part.charge.amount, unused))
                self._lower(lease_id, part, lowered)
                unused -= lowered
            self._add(parts[-1], max(0, -unused))

    def renew(self, lease_id: str, ttl_s: float) -> None:
        taken = self._leases.get(lease_id)
        if taken is not None:
            taken.expires = self._monotonic() + ttl_s
            for part in taken.parts:
                if part.charge.counter is Counter.HELD:
                    self._counters.setdefault(part.charge.key, _Counter()).held[lease_id] = taken.expires

    def _room(self, charges: Iterable[Charge], now: float) -> bool:
        """Whether every counter exists or can be made. What is idle or expired makes room first."""
        missing = sum(charge.key not in self._counters for charge in charges)
        if len(self._leases) >= MOST_LEASES:
            for lease_id in [name for name, taken in self._leases.items() if taken.expires <= now]:
                del self._leases[lease_id]
        if len(self._counters) + missing > MOST_COUNTERS:
            wall = self._wall()
            for key in [name for name, counter in self._counters.items() if counter.is_idle(int(now), wall)]:
                del self._counters[key]
        return len(self._counters) + missing <= MOST_COUNTERS and len(self._leases) < MOST_LEASES

    def _judge(self, charge: Charge, now: float) -> Refusal | None:
        counter = self._counters.setdefault(charge.key, _Counter())
        used, limit = self._used(counter, charge, now), local_limit(charge)
        if charge.amount == 0 or used + charge.amount <= limit:
            return None
        wait_s = RETRY_S
        if charge.counter is Counter.RATE and charge.amount <= limit:
            wait_s = counter.minute.wait_s(used + charge.amount - limit, now)
        return _refusal(charge, used, wait_s)

    def _used(self, counter: _Counter, charge: Charge, now: float) -> int:
        if charge.counter is Counter.RATE:
            counter.minute.prune(int(now))
            return counter.minute.total
        if charge.counter is Counter.CALENDAR:
            return counter.windows.get(charge.start(self._wall()), 0)
        counter.expire(now)
        return len(counter.held)

    def _count(self, lease_id: str, charges: Iterable[Charge], now: float, ttl_s: float) -> None:
        taken = self._leases.setdefault(lease_id, _Taken(0.0, []))
        taken.expires = now + ttl_s
        for charge in charges:
            place = int(now) if charge.counter is Counter.RATE else charge.start(self._wall())
            part = _Part(charge, place)
            taken.parts.append(part)
            if charge.counter is not Counter.HELD:
                self._add(part, charge.amount)
            elif charge.amount:
                self._counters[charge.key].held[lease_id] = taken.expires

    def _add(self, part: _Part, units: int) -> None:
        counter = self._counters.setdefault(part.charge.key, _Counter())
        if units and part.charge.counter is Counter.RATE:
            counter.minute.add(int(self._monotonic()), units)
        elif units and part.charge.counter is Counter.CALENDAR:
            counter.windows[part.place] = counter.windows.get(part.place, 0) + units
            for start in sorted(counter.windows)[:-2]:
                del counter.windows[start]

    def _lower(self, lease_id: str, part: _Part, units: int) -> None:
        counter = self._counters.get(part.charge.key)
        if counter is None:
            return
        if part.charge.counter is Counter.RATE:
            counter.minute.lower(part.place, units)
        elif part.charge.counter is Counter.HELD:
            counter.held.pop(lease_id, None)
        elif part.place in counter.windows:
            counter.windows[part.place] -= units


def local_limit(charge: Charge) -> int:
    """What one process may admit of the limit while the store is away."""
    return charge.local if charge.hard is None else min(charge.local, charge.hard)


def _refusal(charge: Charge, used: int, wait_s: float) -> Refusal:
    return Refusal(
        quota_id=charge.quota_id,
        level=charge.level,
        kind=charge.kind,
        limit=local_limit(charge),
        used=used,
        amount=charge.amount,
        retry_after_s=wait_s,
        exact=False,
        away=True,
    )
