"""What a replica's silence means.

Layer: service. Pure policy: state, age and limits in, state out; no clock, no I/O. A replica that speaks is
believed; one that does not becomes STALE, then LOST, and is never LOST without having been silent long enough
while this control plane was able to hear it (F19).
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import Settings
from dataplane.protocol import ReplicaState

SILENT = frozenset({ReplicaState.STALE, ReplicaState.LOST})


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of silence after which a replica is STALE and LOST."""

    stale_after_s: float
    lost_after_s: float

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        return cls(settings.stale_after_s, settings.lost_after_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state that silence has brought about, and the sentence that says why."""

    state: ReplicaState
    reason: str


def effective(reported: ReplicaState, drain_wanted: bool) -> ReplicaState:
    """The state of a replica that speaks: its own word, but DRAINING as soon as an operator wants it drained."""
    if drain_wanted and reported is ReplicaState.READY:
        return ReplicaState.DRAINING
    return reported


def silence(now: float, last_report_at: float, listening_since: float) -> float:
    """Seconds of silence that count: from the last report or from when this control plane began to listen."""
    return max(0.0, now - max(last_report_at, listening_since))


def judge(state: ReplicaState, silent_s: float, limits: Limits) -> Verdict | None:
    """What `silent_s` of silence makes of a replica in `state`; None while nothing changes.

    LOST is final until the replica speaks again; STALE only ever becomes LOST.
    """
    if state is ReplicaState.LOST:
        return None
    if silent_s > limits.lost_after_s:
        return Verdict(ReplicaState.LOST, f"no report for more than {limits.lost_after_s:g} s")
    if silent_s > limits.stale_after_s and state is not ReplicaState.STALE:
        return Verdict(ReplicaState.STALE, f"no report for more than {limits.stale_after_s:g} s")
    return None


def seconds_to_change(state: ReplicaState, silent_s: float, limits: Limits) -> float | None:
    """In how many seconds of further silence `judge` will change `state`; None when it never will."""
    if state is ReplicaState.LOST:
        return None
    limit = limits.lost_after_s if state is ReplicaState.STALE else limits.stale_after_s
    return max(0.0, limit - silent_s)
