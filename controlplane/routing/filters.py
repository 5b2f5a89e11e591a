"""Which replicas may take a request, and why the others may not.

Layer: service. Pure. A filter takes candidates and returns the survivors and a reason for everyone it dropped
(STYLE rule 27). Filters must never pick: choosing among survivors is the scorers' part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from controlplane.decision import Rejection
from controlplane.routing.candidates import Candidate, RoutingSnapshot
from dataplane.protocol import ReplicaState


class Filtered(NamedTuple):
    survivors: Sequence[Candidate]
    rejected: list[Rejection]


Filter = Callable[[Sequence[Candidate], RoutingSnapshot], Filtered]

TIERS_CURRENT = (ReplicaState.READY, ReplicaState.STALE, ReplicaState.LOST)
"""Order of preference. Silence (STALE, LOST) is missing evidence, not bad evidence: it never stops traffic (F19).
But when another replica's own word is heard, reports do arrive, and one that is LOST all the same is gone."""

SPEAKING = frozenset({ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.FAILED})
"""States that a replica's own recent report said."""

TIERS_OLD = (*TIERS_CURRENT, ReplicaState.STARTING, ReplicaState.FAILED)
"""While states may be old, a replica that was starting or had failed is worth a try when nothing better is left.
One that was draining has asked for no more work and is leaving: it is never tried."""


def not_tried(candidates: Sequence[Candidate], snapshot: RoutingSnapshot) -> Filtered:
    """Drop the replicas this request was already sent to."""
    if not snapshot.excluded:
        return Filtered(candidates, [])
    return _partition(candidates, lambda c: c.replica not in snapshot.excluded, "already tried for this request")


def takes_requests(candidates: Sequence[Candidate], snapshot: RoutingSnapshot) -> Filtered:
    """Drop the replicas whose state takes no requests at all."""
    tiers = _tiers(snapshot)
    survivors = [c for c in candidates if c.state in tiers]
    if len(survivors) == len(candidates):
        return Filtered(candidates, [])
    rejected = [Rejection(c.replica, f"{c.state} takes no requests") for c in candidates if c.state not in tiers]
    return Filtered(survivors, rejected)


def not_gone(candidates: Sequence[Candidate], snapshot: RoutingSnapshot) -> Filtered:
    """Drop the LOST as long as any replica of the model still speaks: their silence is then their own."""
    if not snapshot.current or not any(c.state in SPEAKING for c in snapshot.candidates):
        return Filtered(candidates, [])
    return _partition(candidates, lambda c: c.state is not ReplicaState.LOST, "lost while others report")


def prefer_reachable(candidates: Sequence[Candidate], snapshot: RoutingSnapshot) -> Filtered:
    """Drop suspects as long as somebody else is left: a refused connection weighs more than silence."""
    if all(c.suspect for c in candidates) or not any(c.suspect for c in candidates):
        return Filtered(candidates, [])
    return _partition(candidates, lambda c: not c.suspect, "dropped a connection since its last report")


def best_state(candidates: Sequence[Candidate], snapshot: RoutingSnapshot) -> Filtered:
    """Keep the best tier of states that has anybody in it."""
    tiers = _tiers(snapshot)
    best = min((tiers.index(c.state) for c in candidates), default=0)
    survivors = [c for c in candidates if c.state is tiers[best]]
    if len(survivors) == len(candidates):
        return Filtered(candidates, [])
    rejected = [
        Rejection(c.replica, f"{c.state} while another is {tiers[best]}")
        for c in candidates
        if c.state is not tiers[best]
    ]
    return Filtered(survivors, rejected)


FILTERS: tuple[Filter, ...] = (not_tried, takes_requests, not_gone, prefer_reachable, best_state)
"""In order: each sees what the one before left over."""


def _tiers(snapshot: RoutingSnapshot) -> tuple[ReplicaState, ...]:
    return TIERS_CURRENT if snapshot.current else TIERS_OLD


def _partition(candidates: Sequence[Candidate], keep: Callable[[Candidate], bool], reason: str) -> Filtered:
    survivors = [c for c in candidates if keep(c)]
    return Filtered(survivors, [Rejection(c.replica, reason) for c in candidates if not keep(c)])
