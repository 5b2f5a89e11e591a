"""Rolling 10 s rows up to 60 s and those to 3600 s, each window once per state of its source.

Layer: service. Decides; one call is one transaction of the caller's. A window is due while its source rows have
changed since the last finished run, so a missed tick is caught up by the next one, late data rolls its window again,
and a redelivered or doubled job finds nothing to do (F38, F39).
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.telemetry import repository
from controlplane.telemetry.intake import MINUTE_JOB
from controlplane.telemetry.repository import Claim
from controlplane.telemetry.windows import WindowRow, aligned, roll_up
from dataplane.protocol import WINDOW_SECONDS

HOUR_JOB = "rollup-3600"
CLAIM_TTL_S = 120.0
"""A worker that does not finish a window within this time loses it to whoever asks next."""
MOST_CLAIMS = 60
"""Windows one tick hands out per job: catching up after an outage is bounded per run."""


class StaleClaimError(Exception):
    """The claim was taken over or finished by somebody else; nothing of this run may be committed."""


@dataclass(frozen=True, slots=True)
class Job:
    """One step of rolling up. `grace_s` is how long after its end a window waits for reports under way."""

    name: str
    source_resolution: int
    resolution: int
    grace_s: int
    next_name: str | None = None


JOBS = {
    job.name: job
    for job in (
        Job(MINUTE_JOB, WINDOW_SECONDS, 60, 20, HOUR_JOB),
        Job(HOUR_JOB, 60, 3600, 120),
    )
}


def latest_closed(job: Job, now: float) -> int:
    """The start of the newest window of `job` that may be rolled up at `now`."""
    return aligned(int(now) - job.grace_s, job.resolution) - job.resolution


async def claim_due(
    session: AsyncSession, job: Job, *, holder: str, now: float, most: int = MOST_CLAIMS
) -> list[Claim]:
    """Claim due windows, oldest first. The caller publishes one run per claim once this is committed."""
    return await repository.claim(
        session, job.name, holder=holder, latest=latest_closed(job, now), ttl_s=CLAIM_TTL_S, most=most
    )


async def run_claim(session: AsyncSession, claim: Claim) -> int:
    """Roll up the claimed window; returns the number of rows written.

    Raises StaleClaimError when the claim is not this run's any more.
    """
    job = JOBS[claim.job]
    start, end = claim.window_start, claim.window_start + job.resolution
    source = await repository.windows(session, job.source_resolution, start, end)
    rolled = roll_up(source, start=start, source_resolution=job.source_resolution)
    rows = [WindowRow(key, claim.fence, data) for key, data in rolled]
    await repository.put_windows(session, job.resolution, rows)
    if not await repository.finish(session, claim):
        raise StaleClaimError(f"{claim.job} {start}: claim {claim.fence} was taken over")
    if job.next_name is not None:
        await repository.touch(session, job.next_name, [aligned(start, JOBS[job.next_name].resolution)])
    return len(rows)


async def lags(session: AsyncSession, now: float) -> dict[str, float]:
    """By job, how many seconds ago the oldest window still due became ready to be rolled up; 0 when none is."""
    found = {}
    for job in JOBS.values():
        due = await repository.oldest_due(session, job.name)
        found[job.name] = 0.0 if due is None else max(0.0, now - due - job.resolution - job.grace_s)
    return found
