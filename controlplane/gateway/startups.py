"""When a replica that loads its model may be expected to be ready.

Layer: service. No I/O, and the clock is the caller's. What is known is what this gateway has seen: since when a replica
starts, and how long those of its pool took before. Where none was seen, one is expected to take as long again as it has
taken already. It must never stop a request: it only tells those that are refused when to come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from controlplane.fleet.schemas import FleetView, ReplicaRoute
from dataplane.protocol import ReplicaState

REMEMBERED = 8
"""Starts of one pool that are looked back on."""


class Startups:
    """Memory is bounded by the fleet."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._took: dict[str, deque[float]] = {}

    def saw(self, view: FleetView, now: float) -> None:
        """The fleet at `now`, in seconds."""
        for route in view.replicas:
            if route.state is ReplicaState.READY and (since := self._since.get(route.replica)) is not None:
                self._took.setdefault(route.pool, deque(maxlen=REMEMBERED)).append(now - since)
        starting = (route.replica for route in view.replicas if route.state is ReplicaState.STARTING)
        self._since = {name: self._since.get(name, now) for name in starting}
        pools = {pool.name for pool in view.pools}
        self._took = {pool: took for pool, took in self._took.items() if pool in pools}

    def ready_in_s(self, routes: Iterable[ReplicaRoute], now: float) -> float | None:
        """Seconds until the first of `routes` that starts may be ready; None when none does."""
        waits = [
            self._left_s(route, now - self._since[route.replica]) for route in routes if route.replica in self._since
        ]
        return min(waits, default=None)

    def _left_s(self, route: ReplicaRoute, elapsed_s: float) -> float:
        took = self._took.get(route.pool)
        typical_s = median(took) if took else 0.0
        return typical_s - elapsed_s if typical_s > elapsed_s else elapsed_s
