"""How loaded each replica is, as this gateway knows it.

Layer: service. Own requests in flight are counted exactly; everybody else's are estimated from the replica's last
report and forgotten when it grows old: then the gateway's own counts carry on alone (F19). No I/O here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from controlplane.fleet.schemas import ReplicaLoad, ReplicaRoute
from controlplane.routing.candidates import Candidate
from dataplane.protocol import ReplicaState

SUSPECT_S = 5.0
"""A dropped connection is held against a replica until its next report, and this long when none comes."""

_SILENT = (ReplicaState.STALE, ReplicaState.LOST)


class _Load:
    __slots__ = ("credits", "heard_at", "in_flight", "others", "state", "suspect_until")

    def __init__(self) -> None:
        self.in_flight = 0
        self.others = 0
        self.state: ReplicaState | None = None
        self.heard_at = 0.0
        self.suspect_until = 0.0
        self.credits = 0


class LoadBoard:
    """Load by replica name. `stale_after_s` is how long a report counts."""

    def __init__(self, stale_after_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._loads: dict[str, _Load] = {}

    def begin(self, replica: str) -> None:
        """One request of this gateway goes to `replica`."""
        self._load(replica).in_flight += 1

    def end(self, replica: str) -> None:
        """One request of this gateway on `replica` is over, however it ended."""
        load = self._loads[replica]
        load.in_flight -= 1
        assert load.in_flight >= 0, "a request ended twice"

    def suspect(self, replica: str) -> None:
        """`replica` refused or dropped a connection, or said that it cannot serve."""
        self._load(replica).suspect_until = self._clock() + SUSPECT_S

    def heard(self, report: ReplicaLoad) -> None:
        """A report of a replica came by."""
        load = self._load(report.replica)
        load.heard_at = self._clock()
        load.state = report.state
        load.others = max(0, report.running + report.waiting - load.in_flight)
        load.suspect_until = 0.0
        load.credits = report.credits

    def credits(self, replica: str) -> int:
        """Requests that a replica last said it holds at once, 0 when it did not."""
        load = self._loads.get(replica)
        return load.credits if load else 0

    def in_flight(self, replica: str) -> int:
        load = self._loads.get(replica)
        return load.in_flight if load else 0

    def retain(self, replicas: Iterable[str]) -> None:
        """Forget replicas that left the fleet, once nothing of ours runs on them."""
        kept = set(replicas)
        for name in [n for n, load in self._loads.items() if n not in kept and not load.in_flight]:
            del self._loads[name]

    def candidates(self, routes: Iterable[ReplicaRoute]) -> tuple[Candidate, ...]:
        """What routing looks at, now."""
        now = self._clock()
        return tuple([self._candidate(route, now) for route in routes])

    def _candidate(self, route: ReplicaRoute, now: float) -> Candidate:
        load = self._loads.get(route.replica)
        if load is None:
            return Candidate(route.replica, route.pool, route.url, route.state)
        state, others = route.state, 0
        if load.state is not None and now - load.heard_at <= self._stale_after_s:
            others = load.others
            state = _state(route.state, load.state)
        return Candidate(route.replica, route.pool, route.url, state, load.in_flight, others, now < load.suspect_until)

    def _load(self, replica: str) -> _Load:
        load = self._loads.get(replica)
        if load is None:
            load = self._loads[replica] = _Load()
        return load


def _state(concluded: ReplicaState, reported: ReplicaState) -> ReplicaState:
    """The control plane's word and a fresh report of the replica's own: bad news of either counts, and whoever
    reports is not silent.
    """
    if reported is not ReplicaState.READY:
        return reported
    return reported if concluded in _SILENT else concluded
