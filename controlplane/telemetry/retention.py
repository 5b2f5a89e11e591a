"""Deleting what is older than it is kept for.

Layer: service. Bounded: one call deletes at most a batch of each kind and says whether more remains. Source rows
that were not rolled up yet are never deleted, however old.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.fleet import service as fleet
from controlplane.ledger import service as ledger
from controlplane.telemetry import refusals, repository
from controlplane.telemetry.intake import MINUTE_JOB
from controlplane.telemetry.rollups import HOUR_JOB, JOBS
from dataplane.protocol import WINDOW_SECONDS

HOUR_S = 3600
DAY_S = 86_400
KEPT_S = {WINDOW_SECONDS: DAY_S, 60: 7 * DAY_S, 3600: 396 * DAY_S}
"""Seconds that rows of a resolution are kept: 24 hours, 7 days, 13 months (DESIGN §7)."""
CLAIM_MARGIN_S = 2 * HOUR_S
"""A finished claim outlives its source rows, so that nothing late can roll a window whose rows are gone."""
EVENTS_KEPT_S = 30 * DAY_S
LOST_KEPT_S = 7 * DAY_S
REFUSED_USAGE_KEPT_S = 396 * DAY_S
BATCH = 5_000


async def delete_old(session: AsyncSession, now: float, *, batch: int = BATCH) -> bool:
    """Delete at most `batch` rows of each kind; True when some kind had a full batch, so that more may remain."""
    gone = []
    rolled_from = {JOBS[job].source_resolution: job for job in (MINUTE_JOB, HOUR_JOB)}
    for resolution, kept_s in KEPT_S.items():
        before = int(now) - kept_s
        job = rolled_from.get(resolution)
        if job is not None:
            due = await repository.oldest_due(session, job)
            before = before if due is None else min(before, due)
            gone.append(await repository.delete_claims(session, job, before - CLAIM_MARGIN_S, batch))
        gone.append(await repository.delete_windows(session, resolution, before, batch))
    gone.append(await fleet.forget(session, events_after_s=EVENTS_KEPT_S, lost_after_s=LOST_KEPT_S, limit=batch))
    gone.append(await repository.delete_gateways(session, LOST_KEPT_S, batch))
    gone.append(await refusals.delete_old(session, int(now) - refusals.KEPT_S, batch))
    gone.append(await ledger.forget_refused(session, older_than_s=REFUSED_USAGE_KEPT_S, limit=batch))
    return max(gone) >= batch
