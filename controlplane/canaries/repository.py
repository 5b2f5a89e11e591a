"""Queries over canaries and their runs. Layer: service. Only queries: no rules, no commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Update, and_, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.canaries.models import Canary, CanaryRunRow
from controlplane.canaries.schemas import Cell, Proof, Verdict

LOCK = "tidegate canaries"


class Run(NamedTuple):
    """A run as claimed: whoever raised `fence` last may write."""

    window_start: int
    fence: int


async def try_lock(session: AsyncSession) -> bool:
    """Until this transaction ends; False when another one has it."""
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(func.hashtextextended(LOCK, 0)))))


async def add_run(session: AsyncSession, window_start: int) -> bool:
    """Make a run due; False when it was before."""
    added = await session.scalars(
        insert(CanaryRunRow)
        .values(window_start=window_start)
        .on_conflict_do_nothing()
        .returning(CanaryRunRow.window_start)
    )
    return added.first() is not None


async def last_run(session: AsyncSession) -> float | None:
    """When the newest run was done or, if it is not yet, made due (Unix seconds)."""
    done_at = func.date_part("epoch", func.max(CanaryRunRow.done_at))
    return await session.scalar(select(func.greatest(func.max(CanaryRunRow.window_start), done_at)))


_CLAIM = text(
    """
WITH due AS MATERIALIZED (
  SELECT window_start FROM canary_runs
  WHERE done_at IS NULL AND (expires_at IS NULL OR expires_at < now())
    AND NOT EXISTS (SELECT FROM canary_runs o WHERE o.done_at IS NULL AND o.expires_at >= now())
  ORDER BY window_start DESC LIMIT 1 FOR UPDATE SKIP LOCKED
)
UPDATE canary_runs AS r SET fence = r.fence + 1, holder = :holder, expires_at = now() + make_interval(secs => :ttl_s)
FROM due WHERE r.window_start = due.window_start RETURNING r.window_start, r.fence
"""
)


async def claim(session: AsyncSession, *, holder: str, ttl_s: float) -> Run | None:
    """Claim the newest run that is due, unless one is under way."""
    row = (await session.execute(_CLAIM, {"holder": holder, "ttl_s": ttl_s})).one_or_none()
    return None if row is None else Run(*row)


async def take_over(session: AsyncSession, run: Run, *, holder: str, ttl_s: float) -> Run | None:
    """The claim under a fence of its own, once; None when it is somebody else's or the run is over."""
    fence = await session.scalar(
        update(CanaryRunRow)
        .where(_is(run))
        .values(fence=CanaryRunRow.fence + 1, holder=holder, expires_at=_later(ttl_s))
        .returning(CanaryRunRow.fence)
    )
    return None if fence is None else Run(run.window_start, fence)


async def extend(session: AsyncSession, run: Run, *, ttl_s: float) -> bool:
    """Keep the claim for as long again; False when it is somebody else's."""
    return await _changed(session, update(CanaryRunRow).where(_is(run)).values(expires_at=_later(ttl_s)))


async def give_back(session: AsyncSession, run: Run) -> bool:
    """Let anybody go on with the run; False when somebody else has it."""
    return await _changed(session, update(CanaryRunRow).where(_is(run)).values(expires_at=None, holder=None))


async def finish(session: AsyncSession, run: Run) -> bool:
    """End the run and forget those before it; False when it is somebody else's."""
    if not await _changed(session, update(CanaryRunRow).where(_is(run)).values(done_at=func.now(), expires_at=None)):
        return False
    await session.execute(delete(CanaryRunRow).where(CanaryRunRow.window_start < run.window_start))
    return True


_KEEP = text(
    """
INSERT INTO canaries (gateway, endpoint, level, kind)
SELECT u.* FROM unnest(CAST(:gateway AS text[]), CAST(:endpoint AS text[]), CAST(:level AS text[]),
  CAST(:kind AS text[])) AS u(gateway, endpoint, level, kind)
ON CONFLICT DO NOTHING
"""
)
"""One array a column, for a statement takes no more than 32,767 arguments."""


async def keep_cells(session: AsyncSession, cells: Sequence[Cell]) -> None:
    """Make the canaries of `cells`, in their order, and forget those of other gateways or endpoints."""
    columns = ("gateway", "endpoint", "level", "kind")
    await session.execute(_KEEP, {name: [str(getattr(cell, name)) for cell in cells] for name in columns})
    await session.execute(
        delete(Canary).where(
            Canary.gateway.not_in({cell.gateway for cell in cells})
            | Canary.endpoint.not_in({cell.endpoint for cell in cells})
        )
    )


async def lacked(session: AsyncSession, why: str) -> bool:
    """Whether no run is due and the last one left a canary untried for this reason."""
    undone = select(CanaryRunRow.window_start).where(CanaryRunRow.done_at.is_(None)).exists()
    query = select(Canary.id).where(Canary.why == why, ~undone).limit(1)
    return await session.scalar(query) is not None


async def due(session: AsyncSession, window_start: int, limit: int) -> list[Canary]:
    """Canaries that this run has not come to, in their order."""
    query = select(Canary).where(Canary.window_start < window_start).order_by(Canary.id).limit(limit)
    return list(await session.scalars(query))


async def conclude(session: AsyncSession, run: Run, canary_id: int, proof: Proof) -> None:
    """Write down how a probe ended; what a newer run found stays."""
    mark = {Verdict.PROVEN: "proven_at", Verdict.FAILED: "failed_at", Verdict.NOT_RUN: "not_run_at"}[proof.verdict]
    await session.execute(
        update(Canary)
        .where(Canary.id == canary_id, Canary.window_start < run.window_start)
        .values({mark: func.now(), "why": proof.why, "seconds": proof.seconds, "window_start": run.window_start})
    )


async def canaries(session: AsyncSession, *, after: int, limit: int) -> list[Canary]:
    """In their order, one more than `limit`."""
    return list(await session.scalars(select(Canary).where(Canary.id > after).order_by(Canary.id).limit(limit + 1)))


async def count(session: AsyncSession) -> int:
    return int(await session.scalar(select(func.count()).select_from(Canary)) or 0)


def _is(run: Run) -> ColumnElement[bool]:
    return and_(
        CanaryRunRow.window_start == run.window_start,
        CanaryRunRow.fence == run.fence,
        CanaryRunRow.done_at.is_(None),
    )


def _later(ttl_s: float) -> ColumnElement[datetime]:
    return func.now() + func.make_interval(0, 0, 0, 0, 0, 0, ttl_s)


async def _changed(session: AsyncSession, statement: Update) -> bool:
    return (await session.scalars(statement.returning(CanaryRunRow.window_start))).first() is not None
