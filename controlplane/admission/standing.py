"""How each pool's requests are dispatched now: who waits, what was planned, what was served.

Layer: service. Three queries and a look into Redis for each pool; changes nothing. For the console.
"""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admission import repository
from controlplane.admission.bands import Band
from controlplane.admission.line_state import LineState, read_line
from controlplane.admission.shares import SharePlan
from controlplane.fleet import service as fleet
from controlplane.telemetry.demand import demand

SERVED_S = 60
MOST_SHARES = 50
"""Tenants shown of one pool: those that were served most."""

_read = msgspec.msgpack.Decoder(SharePlan).decode


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: tokens per second planned and served; `of_service` and `of_weights` are parts of all shown."""

    tenant: str
    weight: float
    planned: int
    served: float
    of_service: float
    of_weights: float
    waits: bool


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One pool. `known` is False while Redis does not tell who waits; `epoch` is 0 before the first plan."""

    pool: str
    model: str
    known: bool
    requests: int = 0
    slots: int = 0
    gateways: int = 0
    waiting: tuple[tuple[str, int], ...] = ()
    epoch: int = 0
    planned_at: float = 0.0
    capacity: int = 0
    reasons: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()


async def standings(session: AsyncSession, redis: Redis, now: float) -> list[Standing]:
    """Every pool that gateways queue for, by name: of those that serve one model, the first."""
    served = await demand(session, now, SERVED_S)
    plans = {row.pool: row for row in await repository.plans(session)}
    firsts = {pool.model: pool for pool in reversed(await fleet.list_pools(session))}
    found = []
    for pool in sorted(firsts.values(), key=lambda each: each.name):
        line = await _line(redis, pool.model)
        row = plans.get(pool.name)
        plan = _read(row.plan) if row is not None else None
        told = served[pool.name].served if pool.name in served else {}
        found.append(
            Standing(
                pool=pool.name,
                model=pool.model,
                known=line is not None,
                requests=line.requests if line is not None else 0,
                slots=line.slots if line is not None else 0,
                gateways=line.gateways if line is not None else 0,
                waiting=_by_band(line),
                epoch=plan.epoch if plan is not None else 0,
                planned_at=plan.planned_at if plan is not None else 0.0,
                capacity=plan.capacity if plan is not None else 0,
                reasons=tuple(row.reasons) if row is not None else (),
                shares=_shares(plan, told, line.tenants if line is not None else frozenset()),
            )
        )
    return found


def _by_band(line: LineState | None) -> tuple[tuple[str, int], ...]:
    return tuple((band.name.lower(), len(line.waiting[band])) for band in Band) if line is not None else ()


def _shares(plan: SharePlan | None, told: dict[str, float], waiting: frozenset[str]) -> tuple[Share, ...]:
    planned = {share.tenant: share for share in plan.shares} if plan is not None else {}
    names = sorted({*planned, *told, *waiting}, key=lambda name: (-told.get(name, 0.0), name))[:MOST_SHARES]
    weights = {name: planned[name].weight if name in planned else 1.0 for name in names}
    total, service = sum(weights.values()), sum(told.get(name, 0.0) for name in names)
    return tuple(
        Share(
            tenant=name,
            weight=weights[name],
            planned=planned[name].share if name in planned else 0,
            served=told.get(name, 0.0),
            of_service=told.get(name, 0.0) / service if service else 0.0,
            of_weights=weights[name] / total,
            waits=name in waiting,
        )
        for name in names
    )


async def _line(redis: Redis, model: str) -> LineState | None:
    try:
        return await read_line(redis, model)
    except (RedisError, TimeoutError, OSError):
        return None
