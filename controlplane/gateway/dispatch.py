"""Whose turn it is: between a request's lease and its replica.

Layer: service. One line for each served model; objectives, weights and share plans come as policy. It must never choose
a replica, nor hold up a request that nothing stands before.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable

from redis.asyncio import Redis

from controlplane.admission.bands import Lane
from controlplane.admission.policy import QueueLimits
from controlplane.admission.retry import Asker
from controlplane.admission.shares import SharePlan
from controlplane.errors import CapacityError
from controlplane.gateway.body import InferenceBody
from controlplane.gateway.credits import Credits
from controlplane.gateway.dispatch_metrics import DispatchMetrics, QueueState
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.line import Line
from controlplane.gateway.loads import LoadBoard
from controlplane.gateway.turns import Newly, Turn
from controlplane.gateway.wishes import Wish
from controlplane.redis_pipe import ScriptPipe
from controlplane.settings import Settings
from controlplane.slo.schemas import Slo, slo_for
from controlplane.tenants.schemas import KeyGrant

PLAN_FRESH_S = 60.0
"""An older plan's weights count no more."""
MOST_OBJECTIVES = 4096
"""Combinations of tenant, pool and class whose objective is kept at hand."""


class Dispatch:
    """One process's lines, made when a model is first asked for. `close` ends them."""

    def __init__(
        self,
        redis: Redis,
        pipe: ScriptPipe,
        settings: Settings,
        fleet: FleetDirectory,
        board: LoadBoard,
        *,
        metrics: DispatchMetrics,
        rng: random.Random | None = None,
    ) -> None:
        self._redis = redis
        self._pipe = pipe
        self._settings = settings
        self._fleet = fleet
        self._credits = Credits(settings, fleet, board)
        self._metrics = metrics
        self._rng = rng or random.Random()  # noqa: S311  # part of every policy's signature
        self._limits = QueueLimits(
            short=settings.queue_short,
            long=settings.queue_long,
            tenant=settings.queue_tenant,
            long_prompt=settings.long_prompt,
        )
        self._gateway = f"{settings.gateway_id}:{secrets.token_hex(4)}"
        """This boot: what an earlier one held is forgotten under its own name."""
        self._lines: dict[str, Line] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._plans: dict[str, SharePlan] = {}
        self._weights: dict[str, dict[str, float]] = {}
        self._slos: tuple[Slo, ...] = ()
        self._objectives: dict[tuple[str, str, str], float | None] = {}
        self._closed: Callable[[], CapacityError] | None = None
        metrics.states = self.states

    def line(self, model: str) -> Line:
        """The line of a model. Raises CapacityError (503) for one that nobody serves any more."""
        found = self._lines.get(model)
        if found is None:
            pool = self._fleet.pool(model)
            if pool is None:
                raise self._fleet.no_capacity(model)
            found = self._lines[model] = Line(
                self._redis,
                self._pipe,
                model,
                pool.name,
                self._gateway,
                credits=self._credits,
                metrics=self._metrics,
                limits=self._limits,
                wait_s=self._settings.queue_wait_s,
                rng=self._rng,
            )
            self._follow(found)
            if self._closed is not None:
                found.refuse_waiting(self._closed)
            found.open()
        return found

    def turn_away(self, grant: KeyGrant, wish: Wish, request: InferenceBody) -> None:
        """Refuse a request that a full line would not let in, before anything is taken for it. Raises CapacityError."""
        line = self._lines.get(request.model)
        if line is not None and not line.idle and wish.deadline_s is None:
            most_input = request.size.input_tokens(self._fleet.context(request.model, self._settings.assumed_context))
            line.turn_away(grant.tenant, _asker(grant, request), self._weight(line.pool, grant), wish.band, most_input)

    async def admit(self, grant: KeyGrant, wish: Wish, request: InferenceBody) -> Turn:
        """Wait until `request` may go to a replica. Raises CapacityError (503)."""
        line = self.line(request.model)
        context = self._fleet.context(request.model, self._settings.assumed_context)
        newly = Newly(
            tenant=grant.tenant,
            asker=_asker(grant, request),
            weight=self._weight(line.pool, grant),
            band=wish.band,
            most_input=request.size.input_tokens(context),
            most_output=request.size.output_tokens(context),
            deadline_s=wish.deadline_s,
            objective_s=self._objective(grant.tenant_id, line.pool, wish.service_class) if self._slos else None,
        )
        return await line.turn(newly)

    def closed_to(self, model: str, lane: Lane) -> frozenset[str]:
        """Replicas that a request of `lane` should not go to while others take it."""
        return self._credits.closed_to(model, lane, long_runs=self.line(model).long_runs)

    def adopt_slos(self, slos: tuple[Slo, ...]) -> None:
        """The objectives in force."""
        self._slos = slos
        self._objectives.clear()

    def adopt_plans(self, plans: Iterable[SharePlan]) -> None:
        """Take the plans that are newer than those in force (F38)."""
        for plan in plans:
            if not plan.replaces(self._plans.get(plan.pool)):
                continue
            self._plans[plan.pool] = plan
            self._weights[plan.pool] = plan.weights()
            for line in self._lines.values():
                if line.pool == plan.pool:
                    line.cost = plan.cost

    def fleet_changed(self) -> None:
        """What replicas hold is to be summed anew, of the pools that serve a model another may be the first, and a line
        of a model that nobody serves any more ends once nobody is in it.
        """
        for line in list(self._lines.values()):
            self._follow(line)
            line.changed()
            if line.idle and self._fleet.pool(line.model) is None:
                self._end(line)

    def refuse_waiting(self, error: Callable[[], CapacityError]) -> None:
        """The gateway is shutting down: nobody waits any longer, but is told `error`."""
        self._closed = error
        for line in self._lines.values():
            line.refuse_waiting(error)

    def states(self) -> list[QueueState]:
        """Every line, for metrics."""
        return [line.state(self._epoch(line.pool)) for line in self._lines.values()]

    async def close(self) -> None:
        for line in self._lines.values():
            await line.close()
        await asyncio.gather(*self._closing)

    def _end(self, line: Line) -> None:
        del self._lines[line.model]
        closing = asyncio.create_task(line.close(), name=f"close the line of {line.model}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _follow(self, line: Line) -> None:
        """Plans and objectives are pools': a line follows those of the first pool that serves its model."""
        pool = self._fleet.pool(line.model)
        if pool is not None:
            plan = self._plans.get(pool.name)
            line.pool, line.cost = pool.name, plan.cost if plan is not None else None

    def _weight(self, pool: str, grant: KeyGrant) -> float:
        """As planned, while planning goes on; else the tenant's own."""
        plan = self._plans.get(pool)
        if plan is None or time.time() - plan.planned_at > PLAN_FRESH_S:
            return grant.weight
        return self._weights[pool].get(grant.tenant, grant.weight)

    def _epoch(self, pool: str) -> int:
        plan = self._plans.get(pool)
        return plan.epoch if plan is not None else 0

    def _objective(self, tenant_id: str, pool: str, service_class: str) -> float | None:
        name = (tenant_id, pool, service_class)
        if name not in self._objectives:
            if len(self._objectives) >= MOST_OBJECTIVES:
                self._objectives.clear()
            slo = slo_for(self._slos, tenant_id=tenant_id, pool=pool, service_class=service_class)
            self._objectives[name] = slo.ttft_ms / 1000 if slo is not None and slo.ttft_ms is not None else None
        return self._objectives[name]


def _asker(grant: KeyGrant, request: InferenceBody) -> Asker:
    return Asker(grant.identity, len(request.forward))
