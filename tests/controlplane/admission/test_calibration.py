"""A pool's calibration: what it learns, and how little one tenant or one odd request can move it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admission import calibration
from controlplane.admission.calibration import DOUBTED, ENOUGH, FORGOTTEN_S, MOST_TENANTS, RATIO_BOUNDS, Calibrator

LEAST, MOST = RATIO_BOUNDS
RATIOS = st.floats(LEAST, MOST)
SANE = st.floats(0.5, 3.0)


def see(calibrator: Calibrator, tenant: str, ratio: float, now: float = 0.0, *, cached: bool = False) -> None:
    sizes = {"uncached": 10, "cached": 90} if cached else {"uncached": 100, "cached": 0}
    calibrator.observed(tenant, 1.0, ratio, now=now, **sizes)


def ratio_of(calibrator: Calibrator, tenant: str, now: float = 0.0) -> float:
    return calibrator.of(tenant, now).computed.value


def test_it_learns_the_ratio_apart_for_computed_and_cached_prompts() -> None:
    rng = random.Random(2)
    found = Calibrator("p")
    for _ in range(100):
        see(found, "acme", 1.5 * rng.uniform(0.9, 1.1))
        see(found, "acme", 3.0 * rng.uniform(0.9, 1.1), cached=True)
    for tenant in ("acme", "a newcomer"):
        learnt = found.of(tenant, 0.0)
        assert learnt.ratio(100, 0).value == pytest.approx(1.5, rel=0.07)
        assert learnt.ratio(10, 90).value == pytest.approx(3.0, rel=0.07)
        assert 0.02 < learnt.computed.deviation < 0.08


def test_it_follows_a_pool_that_became_slower() -> None:
    found = Calibrator("p")
    for _ in range(50):
        see(found, "acme", 1.0)
    for _ in range(calibration.REMEMBERED):
        see(found, "acme", 2.0)
    assert ratio_of(found, "acme") == pytest.approx(2.0)


def test_f22_one_observation_that_makes_no_sense_changes_nothing() -> None:
    found = Calibrator("p")
    for _ in range(ENOUGH):
        see(found, "acme", 2.0)
    before = found.of("acme", 0.0)
    for modelled, observed in ((math.nan, 1.0), (1.0, math.inf), (0.0, 1.0), (1.0, -1.0), (1.0, 1e6)):
        found.observed("acme", modelled, observed, uncached=1, cached=0, now=0.0)
    assert found.of("acme", 0.0) == before


def test_before_cached_prompts_were_seen_the_others_tell() -> None:
    found = Calibrator("p")
    assert found.of("acme", 0.0).ratio(1, 9).value == 1.0
    for _ in range(DOUBTED):
        see(found, "acme", 2.0)
    assert found.of("acme", 0.0).ratio(1, 9).value == pytest.approx(2.0)


@given(RATIOS)
def test_the_first_observation_is_not_taken_whole(first: float) -> None:
    found = Calibrator("p")
    see(found, "acme", first)
    assert ratio_of(found, "acme") == 1.0
    see(found, "acme", first)
    assert abs(math.log(ratio_of(found, "acme"))) <= abs(math.log(first)) / 2 + 1e-9


@settings(deadline=None)
@given(st.lists(SANE, min_size=DOUBTED, max_size=40), RATIOS, st.integers(0, 40))
def test_one_odd_observation_leaves_the_ratio_among_the_others(usual: list[float], odd: float, place: int) -> None:
    """Wherever it comes, and however odd."""
    found = Calibrator("p")
    for ratio in [*usual[:place], odd, *usual[place:]]:
        see(found, "acme", ratio)
    low, high = min(*usual, 1.0), max(*usual, 1.0)
    for tenant in ("acme", "a newcomer"):
        assert low - 1e-9 <= ratio_of(found, tenant) <= high + 1e-9


@settings(deadline=None)
@given(
    st.lists(st.lists(SANE, min_size=ENOUGH, max_size=ENOUGH), min_size=2, max_size=6),
    st.lists(RATIOS, min_size=1, max_size=200),
    st.integers(0, 2**32),
)
def test_however_much_one_tenant_sends_the_others_stay_where_they_were(
    others: list[list[float]], flood: list[float], seed: int
) -> None:
    """Those with enough of their own are not moved at all, and who is new not past what the others have seen."""
    calm, found = Calibrator("p"), Calibrator("p")
    for name, ratios in enumerate(others):
        for ratio in ratios:
            see(calm, f"t{name}", ratio)
    order = random.Random(seed)
    queues = {"flood": list(flood), **{f"t{name}": list(row) for name, row in enumerate(others)}}
    while queues:
        tenant = order.choice(sorted(queues))
        see(found, tenant, queues[tenant].pop(0))
        if not queues[tenant]:
            del queues[tenant]
    owns = [ratio_of(calm, f"t{name}") for name in range(len(others))]
    assert [ratio_of(found, f"t{name}") for name in range(len(others))] == owns
    assert min(owns) - 1e-9 <= ratio_of(found, "a newcomer") <= max(owns) + 1e-9


@given(st.lists(RATIOS, min_size=ENOUGH, max_size=200))
def test_of_two_tenants_one_moves_a_third_at_most_halfway(flood: list[float]) -> None:
    found = Calibrator("p")
    for _ in range(ENOUGH):
        see(found, "calm", 1.0)
    for ratio in flood:
        see(found, "flood", ratio)
    assert abs(math.log(ratio_of(found, "a newcomer"))) <= math.log(MOST) / 2 + 1e-9
    assert ratio_of(found, "calm") == 1.0


def test_what_is_old_is_forgotten_also_when_nothing_new_comes() -> None:
    found = Calibrator("p")
    for _ in range(ENOUGH):
        see(found, "slow", 10.0, now=0.0)
        see(found, "late", 2.0, now=100.0)
    assert ratio_of(found, "slow", now=FORGOTTEN_S) == pytest.approx(10.0)
    assert ratio_of(found, "slow", now=FORGOTTEN_S + 1) == pytest.approx(2.0)
    assert ratio_of(found, "slow", now=FORGOTTEN_S + 101) == 1.0
    assert found.of("slow", FORGOTTEN_S + 101).computed.n == 0


def test_memory_is_bounded_and_a_crowd_of_tenants_drops_who_was_silent_longest() -> None:
    found = Calibrator("p")
    for _ in range(ENOUGH):
        see(found, "first", 4.0)
        see(found, "kept", 3.0)
    for number in range(MOST_TENANTS - 1):
        see(found, f"t{number}", 1.0)
    assert ratio_of(found, "kept") == pytest.approx(3.0)
    assert ratio_of(found, "first") == 1.0
    assert found.of("first", 0.0).computed.n == MOST_TENANTS - 1 + ENOUGH
