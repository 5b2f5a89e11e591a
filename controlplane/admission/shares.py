"""How much of a pool each tenant may count on: weighted max-min shares above floors.

Layer: scheduling. Pure. Every token per second of the capacity goes to somebody in one fixed order: first the floors,
then evenly by weight, and nobody gets more than its demand. More capacity or demand of one's own therefore never takes
anything from anybody's, or one's own, share. The sums are exact, for shares are whole tokens per second.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from random import Random

import msgspec

from controlplane.admission.prediction import StepCost
from controlplane.decision import Decision, Rejection

POLICY_VERSION = "max-min/1"
MOST = 10**12
"""Tokens per second, of a floor, a demand or a capacity."""
MAX_WEIGHT = 1000.0


class TenantDemand(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant is owed and wants. `floor` and `demand` are in tokens per second."""

    tenant: str
    weight: float
    floor: int = 0
    demand: int


class ShareSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of one plan. `epoch` is that of the plan in force, 0 for none."""

    pool: str
    epoch: int
    capacity: int
    tenants: tuple[TenantDemand, ...]


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part. `share` is what it gets of the capacity, tokens per second. `weight` is what its service is
    divided by in the shared queue: its own, or more where its floor is above what that would bring.
    """

    tenant: str
    share: int
    weight: float


class SharePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Planner → gateways. A plan replaces those of lower epochs, and no other."""

    pool: str
    epoch: int
    planned_at: float
    capacity: int
    shares: tuple[TenantShare, ...]
    cost: StepCost | None = None
    """What a step of its replicas costs, fitted on what they reported."""

    def weights(self) -> dict[str, float]:
        """By tenant, for the shared queue."""
        return {share.tenant: share.weight for share in self.shares}

    def replaces(self, other: SharePlan | None) -> bool:
        """Whether this plan is to be taken by who has `other`."""
        return other is None or (self.pool == other.pool and self.epoch > other.epoch)


def decide(snapshot: ShareSnapshot, now: float, rng: Random) -> Decision[SharePlan]:
    """The plan for `snapshot`. Tenants that make no sense are left out with a reason and the others planned (F22).

    It draws nothing from `rng`, which is part of every policy's signature. Raises ValueError for a capacity that is
    negative or more than MOST.
    """
    if not 0 <= snapshot.capacity <= MOST:
        raise ValueError(
            f"the capacity of pool {snapshot.pool!r} must be 0 to {MOST} tokens/s, got {snapshot.capacity}"
        )
    tenants: dict[str, TenantDemand] = {}
    rejected: list[Rejection] = []
    for each in snapshot.tenants:
        reason = "named twice" if each.tenant in tenants else _nonsense(each)
        if reason is None:
            tenants[each.tenant] = each
        else:
            rejected.append(Rejection(each.tenant, reason))
    planned = list(tenants.values())
    shares = share_out(snapshot.capacity, planned)
    level = _level(planned, shares)
    plan = SharePlan(
        pool=snapshot.pool,
        epoch=snapshot.epoch + 1,
        planned_at=now,
        capacity=snapshot.capacity,
        shares=tuple(
            TenantShare(tenant=each.tenant, share=shares[each.tenant], weight=_weight(each, level)) for each in planned
        ),
    )
    return Decision(
        choice=plan, reasons=_reasons(snapshot, planned, level), rejected=rejected, policy_version=POLICY_VERSION
    )


def share_out(capacity: int, tenants: Sequence[TenantDemand]) -> dict[str, int]:
    """Whole tokens per second by tenant; they sum to the lesser of `capacity` and all demands.

    The units of capacity are given one after another: the k-th below a tenant's floor has the key (0, k / floor), the
    k-th above it (1, k / weight), and the least key comes first.
    """
    floors = {each.tenant: min(each.floor, each.demand) for each in tenants}
    below = _fill(capacity, {each.tenant: (Fraction(each.floor), 0, floors[each.tenant]) for each in tenants})
    left = capacity - sum(below.values())
    if left <= 0 or below != floors:
        return below
    above = {each.tenant: (Fraction(each.weight), floors[each.tenant], each.demand) for each in tenants}
    return _fill(capacity, above)


def _fill(capacity: int, tenants: Mapping[str, tuple[Fraction, int, int]]) -> dict[str, int]:
    """Raise all from `least` towards `most` by weight until `capacity` is used; by name (weight, least, most)."""
    shares = {name: least for name, (_, least, _) in tenants.items()}
    level = _water(capacity, [bounds for bounds in tenants.values() if bounds[0]])
    for name, (weight, least, most) in tenants.items():
        shares[name] = min(most, max(least, int(level * weight)))
    left = capacity - sum(shares.values())
    turns = [((shares[name] + 1) / weight, name) for name, (weight, _, most) in tenants.items() if shares[name] < most]
    heapq.heapify(turns)
    while left > 0 and turns:
        _, name = heapq.heappop(turns)
        weight, _, most = tenants[name]
        shares[name] += 1
        left -= 1
        if shares[name] < most:
            heapq.heappush(turns, ((shares[name] + 1) / weight, name))
    return shares


def _water(capacity: int, bounds: Iterable[tuple[Fraction, int, int]]) -> Fraction:
    """The level at which Σ min(most, max(least, level · weight)) = capacity, or that of the last to fill up."""
    events: list[tuple[Fraction, Fraction]] = []
    used, slope, at = Fraction(0), Fraction(0), Fraction(0)
    for weight, least, most in bounds:
        used += least
        if least < most:
            events += [(least / weight, weight), (most / weight, -weight)]
    for level, change in sorted(events):
        if slope and used + slope * (level - at) >= capacity:
            return at + max(Fraction(0), capacity - used) / slope
        used += slope * (level - at)
        slope, at = slope + change, level
    return at


def _level(tenants: Sequence[TenantDemand], shares: Mapping[str, int]) -> float:
    """Tokens per second for a weight of 1: the highest that weights alone brought anybody whose demand is not met.

    0 when every demand is met, or when floors took everything.
    """
    hungry = [each for each in tenants if each.floor < shares[each.tenant] < each.demand]
    return max((shares[each.tenant] / each.weight for each in hungry), default=0.0)


def _weight(tenant: TenantDemand, level: float) -> float:
    return max(tenant.weight, tenant.floor / level) if level else tenant.weight


def _nonsense(tenant: TenantDemand) -> str | None:
    if not tenant.tenant:
        return "it has no name"
    if not 0 < tenant.weight <= MAX_WEIGHT:
        return f"its weight must be above 0 and at most {MAX_WEIGHT:g}, got {tenant.weight!r}"
    for name, value in (("floor", tenant.floor), ("demand", tenant.demand)):
        if not 0 <= value <= MOST:
            return f"its {name} must be 0 to {MOST} tokens/s, got {value!r}"
    return None


def _reasons(snapshot: ShareSnapshot, tenants: Sequence[TenantDemand], level: float) -> list[str]:
    wanted = sum(each.demand for each in tenants)
    if wanted <= snapshot.capacity:
        return [f"the capacity of {snapshot.capacity} tokens/s meets the demand of {wanted}"]
    reasons = [f"{wanted} tokens/s are wanted of {snapshot.capacity}"]
    if level:
        reasons.append(f"weights bring {level:.6g} tokens/s each")
    if sum(min(each.floor, each.demand) for each in tenants) > snapshot.capacity:
        reasons.append("the floors are more than the capacity, and are divided in proportion")
    return reasons
