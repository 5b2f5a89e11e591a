"""Queries of telemetry windows, reporting gateways and roll-up claims.

Layer: service. SQL only. Everything that locks several rows does so in key order, and claims come last in a
transaction, so that any number of control planes and workers can run at once without deadlock (F39). A bounded
set of rows to lock stands in a materialised CTE: as a plain sub-query the planner may run it again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.telemetry.figures import StoredWindow
from controlplane.telemetry.models import Gateway, RollupClaim, TelemetryWindow
from controlplane.telemetry.schemas import GatewaySpool
from controlplane.telemetry.windows import GATEWAY, WindowKey, WindowRow
from dataplane.protocol import WINDOW_SECONDS, GatewayReport

_UPSERT_WINDOWS = text(
    """
INSERT INTO telemetry_windows AS w
  (resolution, start, source, instance, boot_epoch, pool, replica, tenant, sequence, data)
SELECT :resolution, u.* FROM unnest(
  CAST(:start AS bigint[]), CAST(:source AS text[]), CAST(:instance AS text[]), CAST(:boot_epoch AS bigint[]),
  CAST(:pool AS text[]), CAST(:replica AS text[]), CAST(:tenant AS text[]), CAST(:sequence AS bigint[]),
  CAST(:data AS bytea[])) AS u(start, source, instance, boot_epoch, pool, replica, tenant, sequence, data)
ON CONFLICT (resolution, start, source, instance, boot_epoch, pool, replica, tenant) DO UPDATE
  SET sequence = excluded.sequence, data = excluded.data, recorded_at = excluded.recorded_at
  WHERE w.sequence < excluded.sequence
RETURNING w.start
"""
)


async def put_windows(session: AsyncSession, resolution: int, rows: Sequence[WindowRow]) -> set[int]:
    """Insert rows or replace those of an older sequence; returns the starts of the windows that changed.

    `rows` hold each key once, in key order (`windows.newest`).
    """
    if not rows:
        return set()
    keys = [row.key for row in rows]
    columns: dict[str, Any] = {name: [getattr(key, name) for key in keys] for name in WindowKey._fields}
    columns |= {
        "resolution": resolution,
        "sequence": [row.sequence for row in rows],
        "data": [row.data for row in rows],
    }
    return set(await session.scalars(_UPSERT_WINDOWS, columns))


async def windows(session: AsyncSession, resolution: int, start: int, end: int) -> list[tuple[WindowKey, bytes]]:
    """All rows of `resolution` with start in [start, end)."""
    columns = TelemetryWindow
    query = select(
        columns.start,
        columns.source,
        columns.instance,
        columns.boot_epoch,
        columns.pool,
        columns.replica,
        columns.tenant,
        columns.data,
    ).where(columns.resolution == resolution, columns.start >= start, columns.start < end)
    return [(WindowKey(*row[:-1]), row[-1]) for row in (await session.execute(query))]


async def recent(
    session: AsyncSession, first: int, last: int, *, tenant: str | None, replica: str | None
) -> list[StoredWindow]:
    """The 10 s rows with start in [first, last] that concern `tenant` and `replica`, and those of mere presence."""
    table = TelemetryWindow
    query = select(
        table.start,
        table.source,
        table.instance,
        table.boot_epoch,
        table.pool,
        table.replica,
        table.tenant,
        table.data,
        func.date_part("epoch", table.recorded_at),
    ).where(table.resolution == WINDOW_SECONDS, table.start.between(first, last))
    if tenant is not None:
        query = query.where(table.source == GATEWAY, table.tenant.in_([tenant, ""]))
    if replica is not None:
        query = query.where(table.replica.in_([replica, ""]))
    rows = await session.execute(query)
    return [StoredWindow(WindowKey(*row[:-2]), row[-2], row[-1]) for row in rows]


async def lock_gateways(session: AsyncSession, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(boot epoch, sequence) of the gateways of `ids` that have reported, locked until the transaction ends."""
    query = select(Gateway.id, Gateway.boot_epoch, Gateway.sequence).where(Gateway.id.in_(ids))
    rows = await session.execute(query.order_by(Gateway.id).with_for_update())
    return {row.id: (row.boot_epoch, row.sequence) for row in rows}


_UPSERT_GATEWAYS = text(
    """
INSERT INTO gateways AS g (id, boot_epoch, sequence, policy_epoch, in_flight, spool_bytes, spool_full,
                           spool_oldest_at, started_at, last_report_at)
SELECT u.id, u.boot_epoch, u.sequence, u.policy_epoch, u.in_flight, u.spool_bytes, u.spool_full,
       to_timestamp(nullif(u.spool_oldest_at, 0)), to_timestamp(u.started_at), now()
FROM unnest(CAST(:id AS text[]), CAST(:boot_epoch AS bigint[]), CAST(:sequence AS bigint[]),
            CAST(:policy_epoch AS bigint[]), CAST(:in_flight AS int[]), CAST(:spool_bytes AS bigint[]),
            CAST(:spool_full AS boolean[]), CAST(:spool_oldest_at AS double precision[]),
            CAST(:started_at AS double precision[]))
  AS u(id, boot_epoch, sequence, policy_epoch, in_flight, spool_bytes, spool_full, spool_oldest_at, started_at)
ON CONFLICT (id) DO UPDATE SET
  boot_epoch = excluded.boot_epoch, sequence = excluded.sequence, policy_epoch = excluded.policy_epoch,
  in_flight = excluded.in_flight, spool_bytes = excluded.spool_bytes, spool_full = excluded.spool_full,
  spool_oldest_at = excluded.spool_oldest_at, started_at = excluded.started_at, last_report_at = excluded.last_report_at
WHERE (excluded.boot_epoch, excluded.sequence) > (g.boot_epoch, g.sequence)
"""
)


async def put_gateways(session: AsyncSession, reports: Iterable[GatewayReport]) -> None:
    """Store what the newest report of each gateway says of it."""
    best: dict[str, GatewayReport] = {}
    for report in reports:
        held = best.get(report.gateway)
        if held is None or (held.boot_epoch, held.sequence) < (report.boot_epoch, report.sequence):
            best[report.gateway] = report
    rows = [best[gateway] for gateway in sorted(best)]
    columns = {
        "id": [row.gateway for row in rows],
        "boot_epoch": [row.boot_epoch for row in rows],
        "sequence": [row.sequence for row in rows],
        "policy_epoch": [row.policy_epoch for row in rows],
        "in_flight": [row.in_flight for row in rows],
        "spool_bytes": [row.spool_bytes for row in rows],
        "spool_full": [row.spool_full for row in rows],
        "spool_oldest_at": [row.spool_oldest_at for row in rows],
        "started_at": [row.started_at for row in rows],
    }
    await session.execute(_UPSERT_GATEWAYS, columns)


_SPOOLS = text(
    """
SELECT id AS gateway, spool_bytes AS waiting_bytes, spool_full AS "full",
  extract(epoch FROM spool_oldest_at)::double precision AS oldest_at,
  extract(epoch FROM last_report_at)::double precision AS heard_at
FROM gateways ORDER BY spool_bytes DESC, id LIMIT :most
"""
)


async def gateway_spools(session: AsyncSession, most: int = 500) -> list[GatewaySpool]:
    """What gateways have on their disks, the fullest first."""
    return [GatewaySpool(**row) for row in (await session.execute(_SPOOLS, {"most": most})).mappings()]


_TOUCH = text(
    """
INSERT INTO rollup_claims AS c (job, window_start)
SELECT :job, u.start FROM unnest(CAST(:starts AS bigint[])) AS u(start)
ON CONFLICT (job, window_start) DO UPDATE SET touched = c.touched + 1 WHERE c.done >= c.touched OR c.holder IS NOT NULL
"""
)


async def touch(session: AsyncSession, job: str, starts: Iterable[int]) -> None:
    """Say that source rows of these windows changed, so that they are due (again).

    The claim row is locked even where nothing changes in it: a worker cannot claim the window between this
    transaction's writes and its commit, so it never reads a state that lacks them and calls it done.
    """
    ordered = sorted(set(starts))
    if ordered:
        await session.execute(_TOUCH, {"job": job, "starts": ordered})


class Claim(NamedTuple):
    """One window to be rolled up by its holder. `touched` is the state of the source rows that this run will see."""

    job: str
    window_start: int
    fence: int
    touched: int


_CLAIM = text(
    """
WITH due AS MATERIALIZED (
  SELECT job, window_start FROM rollup_claims
  WHERE job = :job AND touched > done AND window_start <= :latest AND (holder IS NULL OR expires_at < now())
  ORDER BY job, window_start LIMIT :most FOR UPDATE SKIP LOCKED
)
UPDATE rollup_claims AS c
SET holder = :holder, fence = c.fence + 1, expires_at = now() + make_interval(secs => :ttl_s)
FROM due
WHERE c.job = due.job AND c.window_start = due.window_start
RETURNING c.job, c.window_start, c.fence, c.touched
"""
)


async def claim(session: AsyncSession, job: str, *, holder: str, latest: int, ttl_s: float, most: int) -> list[Claim]:
    """Claim at most `most` due windows that start at or before `latest` and nobody holds, oldest first."""
    values = {"job": job, "holder": holder, "latest": latest, "ttl_s": ttl_s, "most": most}
    rows = await session.execute(_CLAIM, values)
    return sorted((Claim(*row) for row in rows), key=lambda one: one.window_start)


async def finish(session: AsyncSession, claim: Claim) -> bool:
    """Mark the claim done; False when it was taken over meanwhile, and nothing of this run may be kept."""
    finished = await session.scalars(
        update(RollupClaim)
        .where(
            RollupClaim.job == claim.job,
            RollupClaim.window_start == claim.window_start,
            RollupClaim.fence == claim.fence,
            RollupClaim.holder.is_not(None),
        )
        .values(done=claim.touched, holder=None, expires_at=None, finished_at=func.now())
        .returning(RollupClaim.window_start)
    )
    return finished.first() is not None


async def oldest_due(session: AsyncSession, job: str) -> int | None:
    """The start of the oldest window not rolled up yet."""
    query = select(func.min(RollupClaim.window_start)).where(
        RollupClaim.job == job, RollupClaim.touched > RollupClaim.done
    )
    return await session.scalar(query)


_DELETE_WINDOWS = text(
    """
WITH old AS MATERIALIZED (
  SELECT ctid FROM telemetry_windows WHERE resolution = :resolution AND start < :before
  ORDER BY start LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM telemetry_windows AS w USING old WHERE w.ctid = old.ctid RETURNING w.start
"""
)
_DELETE_CLAIMS = text(
    """
WITH old AS MATERIALIZED (
  SELECT job, window_start FROM rollup_claims WHERE job = :job AND window_start < :before AND touched <= done
  ORDER BY job, window_start LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM rollup_claims AS c USING old WHERE c.job = old.job AND c.window_start = old.window_start
RETURNING c.window_start
"""
)


async def delete_windows(session: AsyncSession, resolution: int, before: int, most: int) -> int:
    """Delete at most `most` rows that start before `before`; returns how many went."""
    gone = await session.scalars(_DELETE_WINDOWS, {"resolution": resolution, "before": before, "most": most})
    return len(gone.all())


async def delete_claims(session: AsyncSession, job: str, before: int, most: int) -> int:
    """Delete at most `most` finished claims that start before `before`; returns how many went."""
    gone = await session.scalars(_DELETE_CLAIMS, {"job": job, "before": before, "most": most})
    return len(gone.all())


_DELETE_GATEWAYS = text(
    """
WITH old AS MATERIALIZED (
  SELECT id FROM gateways WHERE last_report_at < now() - make_interval(secs => :age_s)
  ORDER BY id LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM gateways AS g USING old WHERE g.id = old.id RETURNING g.id
"""
)


async def delete_gateways(session: AsyncSession, age_s: float, most: int) -> int:
    """Delete at most `most` gateways whose last report is older than `age_s`; returns how many went."""
    gone = await session.scalars(_DELETE_GATEWAYS, {"age_s": age_s, "most": most})
    return len(gone.all())
