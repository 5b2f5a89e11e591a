"""What silence means, without clock or database."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.liveness import Limits, effective, judge, seconds_to_change, silence
from dataplane.protocol import ReplicaState

LIMITS = Limits(stale_after_s=5.0, lost_after_s=15.0)
SPOKEN = [ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.FAILED]


@pytest.mark.parametrize("state", SPOKEN)
def test_f19_silence_makes_stale_then_lost(state: ReplicaState) -> None:
    assert judge(state, 5.0, LIMITS) is None
    stale = judge(state, 5.01, LIMITS)
    assert stale is not None and stale.state is ReplicaState.STALE and "5 s" in stale.reason
    lost = judge(state, 15.01, LIMITS)
    assert lost is not None and lost.state is ReplicaState.LOST and "15 s" in lost.reason


def test_stale_only_becomes_lost_and_lost_is_final() -> None:
    assert judge(ReplicaState.STALE, 10.0, LIMITS) is None
    found = judge(ReplicaState.STALE, 16.0, LIMITS)
    assert found is not None and found.state is ReplicaState.LOST
    assert judge(ReplicaState.LOST, 1e9, LIMITS) is None


def test_f19_silence_before_this_control_plane_listened_does_not_count() -> None:
    assert silence(now=1_000.0, last_report_at=100.0, listening_since=999.0) == 1.0
    assert silence(now=1_000.0, last_report_at=998.0, listening_since=500.0) == 2.0
    assert silence(now=1_000.0, last_report_at=1_001.0, listening_since=500.0) == 0.0


@given(st.sampled_from(list(ReplicaState)), st.floats(0.0, 60.0))
def test_nothing_changes_before_the_announced_deadline_and_something_does_after_it(
    state: ReplicaState, silent_s: float
) -> None:
    if judge(state, silent_s, LIMITS) is not None:
        return
    wait_s = seconds_to_change(state, silent_s, LIMITS)
    if wait_s is None:
        assert state is ReplicaState.LOST
        return
    assert judge(state, silent_s + wait_s * 0.999, LIMITS) is None
    assert judge(state, silent_s + wait_s + 0.001, LIMITS) is not None


def test_a_drain_shows_at_once_but_hides_no_worse_state() -> None:
    assert effective(ReplicaState.READY, drain_wanted=True) is ReplicaState.DRAINING
    assert effective(ReplicaState.READY, drain_wanted=False) is ReplicaState.READY
    for state in (ReplicaState.STARTING, ReplicaState.FAILED, ReplicaState.DRAINING):
        assert effective(state, drain_wanted=True) is state
