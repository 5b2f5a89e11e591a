"""Admission: who is let in, who is refused with what wait, and whom a full queue sheds."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admission.bands import Band, Lane, band_of, lane_replicas, line_of
from controlplane.admission.policy import (
    Admission,
    AdmissionSnapshot,
    Newcomer,
    Queued,
    QueueLimits,
    decide,
)
from controlplane.admission.prediction import Prediction
from controlplane.evidence import Evidence, EvidenceKind, MixedEvidenceError
from controlplane.layers import Layer

NOW = 1_000.0


def expected(
    wait: float, prefill: float = 0.1, *, error: float = 0.0, work: float = 0.1, **fields: object
) -> Prediction:
    ttft = Evidence(value=wait + prefill, unit="s", kind=EvidenceKind.CALIBRATED, source="test", n=9, error=error)
    values: dict[str, object] = {"ttft": ttft, "wait_s": wait, "prefill_s": prefill, "work_s": work}
    return Prediction(**{**values, "modelled_s": wait + prefill, "layer": Layer.SCHEDULING, **fields})  # type: ignore[arg-type]


def newcomer(tenant: str = "a", band: Band = Band.STANDARD, **fields: object) -> Newcomer:
    values: dict[str, object] = {"uncached": 100, "cached": 0, "arrived_at": NOW, "request_id": "new"}
    return Newcomer(**{**values, "tenant": tenant, "band": band, **fields})  # type: ignore[arg-type]


def queued(number: int, tenant: str = "a", band: Band = Band.STANDARD, **fields: object) -> Queued:
    values: dict[str, object] = {"lane": Lane.SHORT, "arrived_at": NOW - 100 + number, "request_id": f"q{number}"}
    return Queued(**{**values, "tenant": tenant, "band": band, **fields})  # type: ignore[arg-type]


def judged(request: Newcomer, *waiting: Queued, **fields: object) -> Admission:
    snapshot = AdmissionSnapshot(pool="p", request=request, queued=waiting, **fields)  # type: ignore[arg-type]
    choice = decide(snapshot, NOW, Random(0)).choice
    assert choice is not None
    return choice


def refused(request: Newcomer, *waiting: Queued, **fields: object) -> tuple[str, int | None] | None:
    refusal = judged(request, *waiting, **fields).refusal
    return None if refusal is None else (refusal.code, refusal.retry_after_s)


def test_what_comes_in_time_is_let_in_with_its_deadline() -> None:
    choice = judged(newcomer(), prediction=expected(0.3), objective_s=0.5)
    assert (choice.refusal, choice.lane, choice.deadline_at) == (None, Lane.SHORT, NOW + 0.5)
    own = judged(newcomer(deadline_at=NOW + 0.45), prediction=expected(0.3), objective_s=0.5)
    assert own.deadline_at == NOW + 0.45
    assert judged(newcomer(), prediction=expected(0.3)).deadline_at > NOW + 60


def test_f11_what_would_miss_its_deadline_is_refused_at_once_with_a_wait() -> None:
    assert refused(newcomer(), prediction=expected(5.0), objective_s=0.5) == ("deadline_unreachable", 5)
    assert refused(newcomer(deadline_at=NOW + 2), prediction=expected(5.0)) == ("deadline_unreachable", 4)
    unsure = expected(5.0, error=0.5)
    assert refused(newcomer(), prediction=unsure, objective_s=0.5) == ("deadline_unreachable", 7)
    assert refused(newcomer(), prediction=expected(5.0)) is None, "nobody said that it must be quick"


def test_the_layer_that_is_short_is_named() -> None:
    refusal = judged(newcomer(), prediction=expected(5.0, layer=Layer.MEMORY), objective_s=0.5).refusal
    assert refusal is not None
    assert refusal.layer is Layer.MEMORY


def test_a_deadline_that_cannot_be_met_has_no_retry_after() -> None:
    assert refused(newcomer(deadline_at=NOW - 1)) == ("deadline_passed", None)
    assert refused(newcomer(deadline_at=NOW + 1), prediction=expected(0.0, 3.0)) == ("deadline_impossible", None)


def test_an_objective_that_an_idle_pool_misses_refuses_nobody() -> None:
    assert refused(newcomer(), prediction=expected(0.0, 3.0), objective_s=0.5) is None
    assert refused(newcomer(), prediction=expected(9.0, 3.0), objective_s=0.5) is None


def test_what_is_not_calibrated_is_no_prediction() -> None:
    found = expected(1.0)
    mixed = msgspec.structs.replace(found, ttft=msgspec.structs.replace(found.ttft, kind=EvidenceKind.OBSERVED))
    with pytest.raises(MixedEvidenceError):
        judged(newcomer(), prediction=mixed)


def test_f24_a_full_queue_sheds_the_lowest_band_then_the_least_spent_then_the_newest() -> None:
    limits = QueueLimits(short=4)
    waiting = [
        queued(1, band=Band.BATCH, sunk=500), queued(2, band=Band.BATCH), queued(3, band=Band.BATCH), queued(4),
    ]  # fmt: skip
    assert judged(newcomer(), *waiting, limits=limits).shed == ("q3",)
    assert judged(newcomer(), *waiting[:2], queued(4), queued(5), limits=limits).shed == ("q2",)
    assert judged(newcomer(), waiting[0], queued(4), queued(5), queued(6), limits=limits).shed == ("q1",)
    assert refused(newcomer(), *(queued(n) for n in range(4)), limits=limits) == ("queue_full", 1)
    assert refused(newcomer(band=Band.BATCH), *waiting, limits=limits) == ("queue_full", 1)
    assert judged(newcomer(band=Band.BATCH, sunk=10), *waiting, limits=limits).shed == ("q3",)


def test_f24_nobody_is_shed_below_its_weighted_part() -> None:
    limits = QueueLimits(short=8)
    greedy = [queued(n, "greedy", Band.URGENT) for n in range(6)]
    small = [queued(10 + n, "small", Band.BATCH) for n in range(2)]
    weights = {"greedy": 3.0, "small": 1.0}
    choice = judged(newcomer("greedy", Band.URGENT), *greedy, *small, limits=limits, weights=weights)
    assert choice.refusal is not None, "the small tenant holds its part of 2 and no more"
    choice = judged(
        newcomer("small", Band.BATCH), *greedy, queued(9, "greedy"), small[0], limits=limits, weights=weights
    )
    assert choice.shed == ("q9",)


tenants = st.sampled_from(["a", "b", "c"])


@settings(deadline=None)
@given(
    st.lists(st.tuples(tenants, st.sampled_from(Band), st.integers(0, 3)), min_size=6, max_size=6),
    tenants,
    st.sampled_from(Band),
    st.fixed_dictionaries({"a": st.floats(0.1, 10), "b": st.floats(0.1, 10)}),
)
def test_f24_who_is_shed_was_above_its_part_and_no_worse_one_was(
    waiting: list[tuple[str, Band, int]], tenant: str, band: Band, weights: dict[str, float]
) -> None:
    line = [queued(number, name, each, sunk=sunk) for number, (name, each, sunk) in enumerate(waiting)]
    choice = judged(newcomer(tenant, band), *line, limits=QueueLimits(short=6), weights=weights)
    mine = queued(200, tenant, band, request_id="new")
    everyone = [*line, mine]
    gone = next((each for each in line if each.request_id in choice.shed), mine)
    assert (choice.refusal is not None) == (gone is mine)
    counts = Counter(each.tenant for each in everyone)
    total = sum(weights.get(name, 1.0) for name in counts)
    parts = {name: 6 * weights.get(name, 1.0) / total for name in counts}
    assert counts[gone.tenant] > parts[gone.tenant]
    for each in everyone:
        if counts[each.tenant] > parts[each.tenant]:
            assert each.band <= gone.band
            if each.band is gone.band:
                assert each.sunk >= gone.sunk
                if each.sunk == gone.sunk:
                    assert each.arrived_at <= gone.arrived_at


def test_long_prompts_have_a_lane_of_their_own() -> None:
    limits = QueueLimits(short=2, long=1, long_prompt=1_000)
    long = newcomer(uncached=5_000)
    assert judged(long, queued(1), queued(2), limits=limits).lane is Lane.LONG
    assert refused(long, queued(1, lane=Lane.LONG), limits=limits) == ("queue_full", 1)
    assert refused(newcomer(), queued(1, lane=Lane.LONG), queued(2), limits=limits) is None
    assert judged(newcomer(uncached=999, cached=90_000), limits=limits).lane is Lane.SHORT, "the cache makes it short"


def test_bands_and_replicas_of_a_lane() -> None:
    assert [band_of(priority) for priority in (-100, -1, 0, 1, 49, 50, 100)] == [0, 0, 1, 2, 2, 3, 3]
    assert sorted({line_of(lane, band) for lane in Lane for band in Band}) == list(range(8))
    assert lane_replicas(Lane.LONG, 1, []) == lane_replicas(Lane.SHORT, 1, [0]) == [0]
    assert lane_replicas(Lane.LONG, 9, []) == [0, 1]
    assert lane_replicas(Lane.SHORT, 4, [0, 2]) == [1, 3]
    assert lane_replicas(Lane.LONG, 0, []) == []


def replayed(*, promises: bool) -> float:
    """The share of returns that pass. A burst of 400 on a server of one request in 100 ms, all of use for 2 s; each
    that is refused comes back after just the wait it was told.
    """
    service, objective = 0.1, 2.0
    queue: deque[str] = deque()
    free_at, promised = NOW, 0.0
    coming = [(NOW + 0.001 * number, f"r{number}", 0) for number in range(400)]
    passed = failed = 0
    while coming:
        coming.sort()
        now, request_id, tries = coming.pop(0)
        while queue and free_at <= now:
            queue.popleft()
            free_at += service
        if not queue:
            free_at = max(free_at, now)
        wait = max(0.0, free_at - now) + service * len(queue)
        snapshot = AdmissionSnapshot(
            pool="p",
            request=newcomer(request_id=request_id, arrived_at=now),
            prediction=expected(wait, service, work=service),
            objective_s=objective,
            promised_until=promised,
        )
        choice = decide(snapshot, now, Random(0)).choice
        assert choice is not None
        promised = choice.promised_until if promises else 0.0
        passed += tries > 0 and choice.refusal is None
        failed += tries > 0 and choice.refusal is not None
        if choice.refusal is None:
            queue.append(request_id)
        else:
            assert choice.refusal.retry_after_s is not None
            coming.append((now + choice.refusal.retry_after_s, request_id, tries + 1))
    assert passed > 300
    return passed / (passed + failed)


def test_f11_whoever_waits_as_long_as_it_was_told_passes() -> None:
    assert replayed(promises=True) >= 0.9
    assert replayed(promises=False) < 0.5, "told the same wait they come back all at once"


def test_the_decision_is_the_same_again_and_can_be_stored() -> None:
    waiting = tuple(queued(n) for n in range(3))
    snapshot = AdmissionSnapshot(
        pool="p", request=newcomer(), queued=waiting, prediction=expected(1.0), objective_s=0.2
    )
    stored = msgspec.json.decode(msgspec.json.encode(snapshot), type=AdmissionSnapshot)
    assert decide(stored, NOW, Random(1)) == decide(snapshot, NOW, Random(2))
    assert decide(snapshot, NOW, Random(1)).reasons
