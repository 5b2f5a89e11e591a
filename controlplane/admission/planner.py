"""Planning each pool's shares: from weights and floors, what tenants ask for, and what the pool can do.

Layer: scheduling. Takes the caller's session and never commits; `shares.decide` decides. A window is planned once, by
whoever comes first, and a plan replaces none but those of lower epochs (F38, F39).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from random import Random

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admission import repository
from controlplane.admission.line_state import read_line
from controlplane.admission.prediction import fit_cost
from controlplane.admission.service import load_plans
from controlplane.admission.shares import MOST, SharePlan, ShareSnapshot, TenantDemand, decide
from controlplane.fleet import service as fleet
from controlplane.telemetry.demand import PoolDemand, demand
from controlplane.tenants.owner import TenantClaim, claims_of

WINDOW_S = 10
"""A pool is planned once in each."""
LOOKBACK_S = 60
CAPACITY_KEPT = 0.98
"""What a pool could do before counts so much less with each plan."""
MOST_TENANTS = 2_000
"""Of one pool; those that ask for most come first."""

log = logging.getLogger("tidegate.admission")

_NOTHING = PoolDemand(served={}, peak=0.0, steps=())


async def plan_pools(session: AsyncSession, redis: Redis, now: float) -> list[SharePlan]:
    """Plan every pool that gateways queue for; the plans that were put in force by this call."""
    window_start = int(now) // WINDOW_S * WINDOW_S
    wanted = await demand(session, now, LOOKBACK_S)
    before = {plan.pool: plan for plan in await load_plans(session)}
    lines: dict[str, list[str]] = {}
    for pool in await fleet.list_pools(session):
        lines.setdefault(pool.model, []).append(pool.name)
    planned = []
    for model, pools in lines.items():
        told = _together([wanted.get(name, _NOTHING) for name in pools])
        waiting = await _waiting(redis, model)
        busiest = sorted({*told.served, *waiting}, key=lambda tenant: (-told.served.get(tenant, 0.0), tenant))
        claims = await claims_of(session, busiest[:MOST_TENANTS])
        plan = await _plan(
            session,
            pools[0],
            told=told,
            waiting=waiting,
            claims=claims,
            before=before.get(pools[0]),
            window_start=window_start,
            now=now,
        )
        if plan is not None:
            planned.append(plan)
    return planned


async def _plan(
    session: AsyncSession,
    pool: str,
    *,
    told: PoolDemand,
    waiting: frozenset[str],
    claims: Mapping[str, TenantClaim],
    before: SharePlan | None,
    window_start: int,
    now: float,
) -> SharePlan | None:
    """The plan of one pool, None when its window was planned already."""
    did = max(told.peak, CAPACITY_KEPT * before.capacity if before is not None else 0.0)
    capacity = min(MOST, math.ceil(did))
    snapshot = ShareSnapshot(
        pool=pool,
        epoch=before.epoch if before is not None else 0,
        capacity=capacity,
        tenants=tuple(
            TenantDemand(
                tenant=tenant,
                weight=claim.weight,
                floor=min(MOST, int(claim.floor_tokens_per_s)),
                demand=capacity if tenant in waiting else min(MOST, math.ceil(told.served.get(tenant, 0.0))),
            )
            for tenant, claim in claims.items()
        ),
    )
    decision = decide(snapshot, now, Random(0))  # noqa: S311  # it draws nothing
    assert decision.choice is not None, "planning always chooses"
    cost = fit_cost(told.steps, f"of pool {pool}") or (before.cost if before is not None else None)
    plan = msgspec.structs.replace(decision.choice, cost=cost)
    put = await repository.put(
        session,
        pool,
        epoch=plan.epoch,
        window_start=window_start,
        plan=msgspec.msgpack.encode(plan),
        reasons=decision.reasons,
        planned_at=datetime.fromtimestamp(now, UTC),
    )
    if not put:
        return None
    await repository.announce(session, pool)
    return plan


def _together(parts: list[PoolDemand]) -> PoolDemand:
    """Of all pools that serve one model, between which gateways choose."""
    served: dict[str, float] = {}
    for part in parts:
        for tenant, tokens in part.served.items():
            served[tenant] = served.get(tenant, 0.0) + tokens
    return PoolDemand(
        served=served, peak=sum(part.peak for part in parts), steps=tuple(one for part in parts for one in part.steps)
    )


async def _waiting(redis: Redis, model: str) -> frozenset[str]:
    """Tenants that wait for the model; none while Redis cannot tell."""
    try:
        return (await read_line(redis, model)).tenants
    except (RedisError, TimeoutError, OSError) as error:
        log.warning("who waits for model %s cannot be told (%s)", model, type(error).__name__)
        return frozenset()
