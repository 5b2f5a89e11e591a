"""Shares: weighted max-min above floors, exact to the token."""

from __future__ import annotations

import heapq
import math
from fractions import Fraction
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admission.shares import SharePlan, ShareSnapshot, TenantDemand, decide, share_out


def tenant(name: str, weight: float = 1.0, floor: int = 0, demand: int = 10**6) -> TenantDemand:
    return TenantDemand(tenant=name, weight=weight, floor=floor, demand=demand)


def plan(capacity: int, *tenants: TenantDemand, epoch: int = 0) -> SharePlan:
    found = decide(ShareSnapshot(pool="p", epoch=epoch, capacity=capacity, tenants=tenants), 5.0, Random(0)).choice
    assert found is not None
    return found


weights = st.one_of(st.integers(1, 9).map(float), st.floats(0.01, 1000.0))
demands = st.lists(
    st.builds(
        tenant,
        st.sampled_from([f"t{index}" for index in range(12)]),
        weights,
        st.integers(0, 60),
        st.one_of(st.integers(0, 200), st.just(10**9)),
    ),
    max_size=8,
    unique_by=lambda each: each.tenant,
)


def one_by_one(capacity: int, tenants: list[TenantDemand]) -> dict[str, int]:
    """The definition: every unit of capacity to whom it is due."""
    shares = {each.tenant: 0 for each in tenants}
    units: list[tuple[int, Fraction, str]] = []
    by_name = {each.tenant: each for each in tenants}

    def offer(name: str) -> None:
        each, unit = by_name[name], shares[name] + 1
        if unit <= each.demand:
            low = unit <= each.floor
            heapq.heappush(
                units, (0 if low else 1, Fraction(unit) / Fraction(each.floor if low else each.weight), name)
            )

    for name in shares:
        offer(name)
    for _ in range(capacity):
        if not units:
            break
        name = heapq.heappop(units)[2]
        shares[name] += 1
        offer(name)
    return shares


@settings(deadline=None)
@given(st.integers(0, 400), demands)
def test_shares_are_those_of_giving_every_unit_in_turn(capacity: int, tenants: list[TenantDemand]) -> None:
    assert share_out(capacity, tenants) == one_by_one(capacity, tenants)


@settings(deadline=None)
@given(st.integers(0, 10**9), demands)
def test_nothing_is_left_and_nobody_gets_more_than_it_wants(capacity: int, tenants: list[TenantDemand]) -> None:
    shares = share_out(capacity, tenants)
    assert sum(shares.values()) == min(capacity, sum(each.demand for each in tenants))
    assert all(0 <= shares[each.tenant] <= each.demand for each in tenants)


@settings(deadline=None)
@given(st.integers(0, 1000), demands)
def test_f24_floors_are_kept_where_they_can_be(capacity: int, tenants: list[TenantDemand]) -> None:
    shares = share_out(capacity, tenants)
    floors = {each.tenant: min(each.floor, each.demand) for each in tenants}
    if sum(floors.values()) <= capacity:
        assert all(shares[name] >= floor for name, floor in floors.items())
    else:
        assert all(shares[name] <= floor for name, floor in floors.items())


@settings(deadline=None)
@given(st.integers(0, 10**6), demands)
def test_who_wants_more_and_is_above_its_floor_gets_by_weight(capacity: int, tenants: list[TenantDemand]) -> None:
    shares = share_out(capacity, tenants)
    for one in tenants:
        for other in tenants:
            if one.floor < shares[one.tenant] and shares[other.tenant] < other.demand:
                # one's last unit came before the next of other, or other is still below its floor
                assert shares[other.tenant] >= other.floor
                next_unit = Fraction(shares[other.tenant] + 1) / Fraction(other.weight)
                assert Fraction(shares[one.tenant]) / Fraction(one.weight) <= next_unit


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(0, 50), demands)
def test_more_capacity_takes_nothing_from_anybody(capacity: int, more: int, tenants: list[TenantDemand]) -> None:
    before, after = share_out(capacity, tenants), share_out(capacity + more, tenants)
    assert all(after[name] >= share for name, share in before.items())


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50), demands.filter(bool), st.data())
def test_more_demand_or_floor_or_weight_never_costs_its_tenant(
    capacity: int, more: int, tenants: list[TenantDemand], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(tenants) - 1))
    one = tenants[index]
    field = data.draw(st.sampled_from(["demand", "floor", "weight"]))
    raised = msgspec.structs.replace(one, **{field: getattr(one, field) + more})
    others = [raised if each is one else each for each in tenants]
    assert share_out(capacity, others)[one.tenant] >= share_out(capacity, tenants)[one.tenant]


def test_weights_one_and_three_divide_what_a_polite_one_leaves() -> None:
    found = plan(1000, tenant("a"), tenant("b", 3.0), tenant("polite", demand=100, floor=100))
    assert {each.tenant: each.share for each in found.shares} == {"a": 225, "b": 675, "polite": 100}


def test_a_floor_above_the_weights_share_raises_the_weight_in_the_queue() -> None:
    found = plan(1000, tenant("a", 1.0), tenant("b", 3.0), tenant("small", 0.1, floor=200))
    assert {each.tenant: each.share for each in found.shares} == {"a": 200, "b": 600, "small": 200}
    assert found.weights() == pytest.approx({"a": 1.0, "b": 3.0, "small": 1.0})


def test_while_everybody_is_satisfied_weights_are_the_tenants_own() -> None:
    assert plan(1000, tenant("a", 2.0, demand=10, floor=900), tenant("b", demand=5)).weights() == {"a": 2.0, "b": 1.0}


def test_a_plan_replaces_older_ones_of_its_pool_only() -> None:
    older, newer = plan(10, tenant("a"), epoch=3), plan(20, tenant("a"), epoch=4)
    assert (older.epoch, newer.epoch) == (4, 5)
    assert newer.replaces(older)
    assert not older.replaces(newer)
    assert not newer.replaces(newer)
    assert newer.replaces(None)
    assert not newer.replaces(msgspec.structs.replace(older, pool="q"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=SharePlan) == newer


def test_f22_a_tenant_that_makes_no_sense_is_left_out_and_the_others_are_planned() -> None:
    tenants = (
        tenant("nan", math.nan), tenant("", 1.0), tenant("much", 1.0, demand=10**13), tenant("minus", floor=-1),
        tenant("a", 1.0), tenant("a", 2.0),
    )  # fmt: skip
    decision = decide(ShareSnapshot(pool="p", epoch=0, capacity=100, tenants=tenants), 0.0, Random(0))
    assert decision.choice is not None
    assert {each.tenant: each.share for each in decision.choice.shares} == {"a": 100}
    assert [each.candidate for each in decision.rejected] == ["nan", "", "much", "minus", "a"]
    with pytest.raises(ValueError, match="capacity of pool 'p'"):
        plan(-1)


def test_a_thousand_tenants_are_planned_exactly() -> None:
    rng = Random(3)
    tenants = [tenant(f"t{i}", rng.uniform(0.1, 1000), rng.randrange(5000), rng.randrange(10**6)) for i in range(1000)]
    shares = share_out(10**8, tenants)
    assert sum(shares.values()) == 10**8
