"""Queries over share plans. Layer: service. Only queries: no rules, no commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admission.models import SharePlanRow
from controlplane.db import POLICY_CHANNEL


async def plans(session: AsyncSession) -> list[SharePlanRow]:
    """Every pool's plan, in pool order."""
    return list(await session.scalars(select(SharePlanRow).order_by(SharePlanRow.pool)))


async def put(
    session: AsyncSession,
    pool: str,
    *,
    epoch: int,
    window_start: int,
    plan: bytes,
    reasons: Sequence[str],
    planned_at: datetime,
) -> bool:
    """Put the plan of a window in force, unless that window was planned or a plan of the same epoch came first."""
    statement = insert(SharePlanRow).values(
        pool=pool,
        epoch=epoch,
        window_start=window_start,
        plan=plan,
        reasons=list(reasons),
        planned_at=planned_at,
    )
    new = statement.excluded
    done = await session.execute(
        statement.on_conflict_do_update(
            index_elements=[SharePlanRow.pool],
            set_={name: new[name] for name in ("epoch", "window_start", "plan", "reasons", "planned_at")},
            where=(SharePlanRow.epoch < new.epoch) & (SharePlanRow.window_start < new.window_start),
        ).returning(SharePlanRow.pool)
    )
    return done.one_or_none() is not None


async def announce(session: AsyncSession, pool: str) -> None:
    """Tell the gateways of a pool's new plan once the transaction is committed."""
    payload = msgspec.json.encode({"table": "share_plans", "id": pool, "epoch": 0}).decode()
    await session.execute(select(func.pg_notify(POLICY_CHANNEL, payload)))
