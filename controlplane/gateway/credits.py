"""What the replicas of a model can hold, as this gateway knows it.

Layer: service. No I/O. A pool's own setting comes first, then what the replica has told of itself, then the assumed
values. What was told once counts however old it is: a silent replica's size does not change (F19).
"""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.admission.bands import Lane, lane_replicas
from controlplane.admission.dispatch import Credit
from controlplane.errors import CapacityError
from controlplane.fleet.schemas import ReplicaRoute
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.loads import LoadBoard
from controlplane.routing.candidates import Candidate, RoutingSnapshot
from controlplane.routing.filters import FILTERS
from controlplane.settings import Settings


class Credits:
    """`of` a model at this moment."""

    def __init__(self, settings: Settings, fleet: FleetDirectory, board: LoadBoard) -> None:
        self._settings = settings
        self._fleet = fleet
        self._board = board

    def of(self, model: str) -> list[Credit]:
        """One for each replica that routing would choose from now."""
        routes = {route.replica: route for route in self._fleet.replicas(model)}
        survivors = _survivors(model, self._board.candidates(routes.values()), current=self._fleet.listening)
        return [self._credit(routes[candidate.replica]) for candidate in survivors]

    def none_left(self, model: str) -> CapacityError:
        """What a request is told while there are none."""
        return self._fleet.no_capacity(model)

    def closed_to(self, model: str, lane: Lane, *, long_runs: bool) -> frozenset[str]:
        """Replicas that a request of `lane` should not go to; `long_runs` says whether any long prompt does."""
        routes = self._fleet.replicas(model)
        if len(routes) < 2 or (lane is Lane.SHORT and not long_runs):
            return frozenset()
        candidates = self._board.candidates(routes)
        names = sorted(each.replica for each in _survivors(model, candidates, current=self._fleet.listening))
        with_long = lane_replicas(Lane.LONG, len(names), ()) if long_runs else ()
        open_to = {names[place] for place in lane_replicas(lane, len(names), with_long)}
        return frozenset(names) - open_to

    def _credit(self, route: ReplicaRoute) -> Credit:
        settings = self._settings
        pool = self._fleet.pool_of(route.pool)
        context = route.context or settings.assumed_context
        slots = (
            (pool.replica_slots if pool is not None else 0)
            or self._board.credits(route.replica)
            or route.slots
            or settings.assumed_slots
        )
        tokens = (pool.replica_tokens if pool is not None else 0) or route.tokens or slots * context
        return Credit(slots, tokens, min(context, tokens))


def _survivors(model: str, candidates: Sequence[Candidate], *, current: bool) -> Sequence[Candidate]:
    snapshot = RoutingSnapshot(model=model, candidates=tuple(candidates), current=current)
    survivors: Sequence[Candidate] = snapshot.candidates
    for keep in FILTERS:
        if not survivors:
            break
        survivors = keep(survivors, snapshot).survivors
    return survivors
