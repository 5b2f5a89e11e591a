"""How good a surviving replica is, and why.

Layer: service. Pure. A scorer gives a cost (lower is better) with its reason; it must never drop a candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from controlplane.routing.candidates import Candidate


class Score(NamedTuple):
    cost: float
    reason: str


Scorer = Callable[[Candidate], Score]


def least_loaded(candidate: Candidate) -> Score:
    """Requests in flight: this gateway's own, exact and current, plus everybody else's as last reported."""
    load = candidate.in_flight + candidate.others
    return Score(float(load), f"{candidate.in_flight} own + {candidate.others} others in flight")
