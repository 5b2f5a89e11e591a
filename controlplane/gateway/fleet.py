"""The gateway's view of the fleet: pools and replicas as last read, and what is known of each replica's load.

Layer: service. The view is read whole from the fleet service: when a change is announced, every `REREAD_S` while nobody
would announce one, and now and then anyway. A view is never dropped for being old: stale information must not stop
traffic (F19).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from controlplane.errors import CapacityError
from controlplane.fleet.schemas import FleetView, PoolRoute, ReplicaRoute
from controlplane.gateway.errors import capacity
from controlplane.gateway.policy import PolicyChange
from controlplane.gateway.startups import Startups
from dataplane.protocol import ReplicaState

REREAD_S = 1.0
ANYWAY_S = 30.0
SETTLE_S = 0.02
"""Announcements this close together cost one read."""
READ_TIMEOUT_S = 3.0
NEXT_REPORT_S = 2
"""Whole seconds within which replicas report, once a second, and gateways hear of it."""
LONGEST_START_S = 60
"""Nobody is told to wait longer for a replica that starts."""

logger = logging.getLogger("tidegate.gateway")

LoadFleet = Callable[[], Awaitable[FleetView]]


class FleetDirectory:
    """Pools and replicas by model. `load` reads the fleet; any exception means Postgres cannot answer. `on_view` is
    told of every view taken.
    """

    def __init__(
        self,
        load: LoadFleet,
        on_view: Callable[[FleetView], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._startups = Startups()
        self._load = load
        self._on_view = on_view
        self._wanted = asyncio.Event()
        self._listening = False
        self._away = False
        self._pools: dict[str, PoolRoute] = {}
        self._replicas: dict[str, tuple[ReplicaRoute, ...]] = {}
        self._names: frozenset[str] = frozenset()
        self._by_name: dict[str, PoolRoute] = {}
        self._pool_names: dict[str, tuple[str, ...]] = {}
        self._contexts: dict[str, frozenset[int]] = {}
        self.view: FleetView | None = None
        """None until the fleet was read once, from Postgres or a snapshot."""

    @property
    def listening(self) -> bool:
        """Whether a change would be heard of: False means that states may be old."""
        return self._listening

    def pool(self, model: str) -> PoolRoute | None:
        """A pool that serves `model`; of several, the first by name."""
        return self._pools.get(model)

    def pool_of(self, name: str) -> PoolRoute | None:
        """The pool of this name."""
        return self._by_name.get(name)

    def pools(self) -> list[PoolRoute]:
        """One pool for each served model, by model name."""
        return [self._pools[model] for model in sorted(self._pools)]

    def pool_names(self, model: str) -> tuple[str, ...]:
        """The pools that serve `model`."""
        return self._pool_names.get(model, ())

    def context(self, model: str, assumed: int) -> int:
        """The longest context of the model's replicas; `assumed` of those that have not told theirs."""
        return max((told or assumed for told in self._contexts.get(model, ())), default=assumed)

    def replicas(self, model: str) -> tuple[ReplicaRoute, ...]:
        """Every replica of every pool that serves `model`."""
        return self._replicas.get(model, ())

    def no_capacity(self, model: str) -> CapacityError:
        """What a request for `model` is told when no replica can take it: to come back when one that starts may be
        ready, else after the next report.
        """
        wait_s = self._startups.ready_in_s(self.replicas(model), self._clock())
        retry_after_s = NEXT_REPORT_S if wait_s is None else min(LONGEST_START_S, max(1, math.ceil(wait_s)))
        message = f"No replica of {model!r} can take requests; try again."
        return capacity(message, "no_capacity", retry_after_s=retry_after_s)

    def knows(self, replica: str) -> bool:
        """Whether the fleet has a replica of this name."""
        return replica in self._names

    def ready(self) -> int:
        """How many replicas are READY, as far as this gateway has heard."""
        return sum(route.state is ReplicaState.READY for routes in self._replicas.values() for route in routes)

    def adopt(self, view: FleetView) -> None:
        """Take `view` as the present one."""
        self.view = view
        self._startups.saw(view, self._clock())
        self._pools = {pool.model: pool for pool in sorted(view.pools, key=lambda p: p.name, reverse=True)}
        self._names = frozenset(route.replica for route in view.replicas)
        self._by_name = {pool.name: pool for pool in view.pools}
        models = {pool.name: pool.model for pool in view.pools}
        replicas: dict[str, list[ReplicaRoute]] = {}
        for route in view.replicas:
            if (model := models.get(route.pool)) is not None:
                replicas.setdefault(model, []).append(route)
        self._replicas = {model: tuple(routes) for model, routes in replicas.items()}
        self._contexts = {model: frozenset(route.context for route in routes) for model, routes in replicas.items()}
        self._pool_names = {
            model: tuple(pool.name for pool in view.pools if pool.model == model) for model in self._pools
        }
        self._on_view(view)

    def on_listening(self) -> None:
        self._listening = True
        self._wanted.set()

    def on_silence(self) -> None:
        self._listening = False
        self._wanted.set()

    def on_change(self, change: PolicyChange) -> None:
        if change.table in {"pools", "replicas"}:
            self._wanted.set()

    async def refresh(self) -> bool:
        """Read the fleet now; False when Postgres cannot answer."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                view = await self._load()
        except Exception as error:
            if not self._away:
                self._away = True
                logger.warning(
                    "The fleet cannot be read from Postgres (%s); the last view goes on", type(error).__name__
                )
            return False
        if self._away:
            self._away = False
            logger.info("The fleet can be read again")
        self.adopt(view)
        return True

    async def run(self) -> None:
        """Keep the view fresh; ends only by cancellation."""
        while True:
            self._wanted.clear()
            read = await self.refresh()
            wait = ANYWAY_S if self._listening and read else REREAD_S
            try:
                async with asyncio.timeout(wait):
                    await self._wanted.wait()
                    await asyncio.sleep(SETTLE_S)
            except TimeoutError:
                continue
