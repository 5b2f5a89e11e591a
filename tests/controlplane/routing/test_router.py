"""Routing policy: which replica a request goes to, with reasons."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.routing.candidates import Candidate, RoutingSnapshot
from controlplane.routing.filters import SPEAKING, TIERS_CURRENT, TIERS_OLD
from controlplane.routing.router import POLICY_VERSION, decide
from dataplane.protocol import ReplicaState


def candidate(name: str, state: ReplicaState = ReplicaState.READY, **fields: object) -> Candidate:
    return Candidate(replica=name, pool="p", url=f"http://{name}", state=state, **fields)


def snapshot(*candidates: Candidate, **fields: object) -> RoutingSnapshot:
    return RoutingSnapshot(model="m", candidates=candidates, **fields)


def chosen(*candidates: Candidate, seed: int = 0, **fields: object) -> str | None:
    choice = decide(snapshot(*candidates, **fields), 0.0, Random(seed)).choice
    return choice.replica if choice else None


candidates_strategy = st.lists(
    st.builds(
        Candidate,
        replica=st.sampled_from([f"r{i}" for i in range(8)]),
        pool=st.just("p"),
        url=st.just("http://r"),
        state=st.sampled_from(list(ReplicaState)),
        in_flight=st.integers(0, 50),
        others=st.integers(0, 50),
        suspect=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda c: c.replica,
)
snapshots = st.builds(
    RoutingSnapshot,
    model=st.just("m"),
    candidates=candidates_strategy.map(tuple),
    current=st.booleans(),
    excluded=st.frozensets(st.sampled_from([f"r{i}" for i in range(8)]), max_size=3),
)


def test_least_loaded_counts_own_and_others_requests() -> None:
    busy_here = candidate("a", in_flight=3, others=0)
    busy_elsewhere = candidate("b", in_flight=0, others=5)
    free = candidate("c", in_flight=1, others=1)
    decision = decide(snapshot(busy_here, busy_elsewhere, free), 0.0, Random(1))
    assert decision.choice == free
    assert decision.reasons == ["1 own + 1 others in flight"]
    assert sorted(decision.alternatives) == ["a", "b"]
    assert decision.policy_version == POLICY_VERSION


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((ReplicaState.STALE, ReplicaState.READY), "r1"),
        ((ReplicaState.LOST, ReplicaState.STALE), "r1"),
        ((ReplicaState.LOST, ReplicaState.LOST, ReplicaState.STALE), "r2"),
        ((ReplicaState.LOST,), "r0"),
        ((ReplicaState.FAILED, ReplicaState.STARTING, ReplicaState.DRAINING), None),
    ],
)
def test_f19_silence_is_the_last_resort_but_never_stops_traffic(
    states: tuple[ReplicaState, ...], expected: str | None
) -> None:
    replicas = [candidate(f"r{i}", state) for i, state in enumerate(states)]
    assert chosen(*replicas) == expected


@pytest.mark.parametrize("other", [ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.FAILED])
def test_a_lost_replica_is_gone_while_another_one_reports(other: ReplicaState) -> None:
    lost, speaking = candidate("lost", ReplicaState.LOST), candidate("speaking", other)
    decision = decide(snapshot(lost, speaking), 0.0, Random(1))
    assert decision.choice is None
    assert {rejection.candidate for rejection in decision.rejected} == {"lost", "speaking"}
    assert chosen(lost, speaking, current=False) is not None


def test_f19_old_bad_news_is_tried_when_nothing_better_is_known() -> None:
    starting, failed = candidate("s", ReplicaState.STARTING), candidate("f", ReplicaState.FAILED)
    assert chosen(starting, failed, current=True) is None
    assert chosen(starting, failed, current=False) == "s"
    assert chosen(failed, current=False) == "f"
    assert chosen(candidate("d", ReplicaState.DRAINING), current=False) is None


def test_a_replica_that_just_refused_is_avoided_only_while_another_is_left() -> None:
    refused = candidate("a", suspect=True)
    assert chosen(refused, candidate("b", ReplicaState.STALE, in_flight=40)) == "b"
    assert chosen(refused) == "a"
    assert chosen(refused, candidate("b", ReplicaState.FAILED)) == "a"


def test_a_replica_already_tried_is_not_tried_again() -> None:
    decision = decide(snapshot(candidate("a"), excluded=frozenset({"a"})), 0.0, Random(0))
    assert decision.choice is None
    assert [(r.candidate, r.reason) for r in decision.rejected] == [("a", "already tried for this request")]


def test_ties_are_broken_evenly_and_do_not_depend_on_order() -> None:
    replicas = [candidate(name) for name in "abcd"]
    drawn = Counter(chosen(*replicas, seed=seed) for seed in range(2000))
    assert set(drawn) == set("abcd")
    assert min(drawn.values()) > 400
    assert all(chosen(*replicas, seed=s) == chosen(*reversed(replicas), seed=s) for s in range(50))


@given(snapshots, st.integers(0, 2**32))
def test_every_candidate_is_chosen_an_alternative_or_rejected_with_a_reason(snap: RoutingSnapshot, seed: int) -> None:
    decision = decide(snap, 0.0, Random(seed))
    accounted = [r.candidate for r in decision.rejected] + decision.alternatives
    if decision.choice:
        accounted.append(decision.choice.replica)
    assert sorted(accounted) == sorted(c.replica for c in snap.candidates)
    assert decision.reasons
    assert all(r.reason for r in decision.rejected)


@given(snapshots, st.integers(0, 2**32))
def test_the_choice_is_cheapest_of_its_tier_and_never_a_forbidden_state(snap: RoutingSnapshot, seed: int) -> None:
    decision = decide(snap, 0.0, Random(seed))
    tiers = TIERS_CURRENT if snap.current else TIERS_OLD
    gone = snap.current and any(c.state in SPEAKING for c in snap.candidates)
    allowed = [
        c
        for c in snap.candidates
        if c.state in tiers and c.replica not in snap.excluded and not (gone and c.state is ReplicaState.LOST)
    ]
    assert (decision.choice is None) == (not allowed)
    if decision.choice is None:
        return
    choice = decision.choice
    peers = [c for c in allowed if c.suspect == choice.suspect]
    assert not choice.suspect or all(c.suspect for c in allowed)
    assert tiers.index(choice.state) == min(tiers.index(c.state) for c in peers)
    same = [c for c in peers if c.state is choice.state]
    assert choice.in_flight + choice.others == min(c.in_flight + c.others for c in same)


@given(snapshots, st.integers(0, 2**32))
def test_a_stored_snapshot_replays_to_the_same_decision(snap: RoutingSnapshot, seed: int) -> None:
    stored = msgspec.msgpack.encode(snap)
    replayed = msgspec.msgpack.decode(stored, type=RoutingSnapshot)
    assert decide(replayed, 0.0, Random(seed)) == decide(snap, 0.0, Random(seed))


@given(snapshots, st.integers(0, 2**32))
def test_one_more_request_elsewhere_never_makes_the_choice_worse(snap: RoutingSnapshot, seed: int) -> None:
    """Loading every replica but the chosen one keeps the choice."""
    first = decide(snap, 0.0, Random(seed)).choice
    if first is None:
        return
    heavier = tuple(
        c if c.replica == first.replica else msgspec.structs.replace(c, in_flight=c.in_flight + 1)
        for c in snap.candidates
    )
    assert decide(msgspec.structs.replace(snap, candidates=heavier), 0.0, Random(seed)).choice == first
