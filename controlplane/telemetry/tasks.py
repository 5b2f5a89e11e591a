"""Background jobs of telemetry: rolling up and deleting. Layer: service. Each run is one transaction."""

from __future__ import annotations

from controlplane.telemetry import retention, rollups
from controlplane.telemetry.repository import Claim
from controlplane.worker import ExpectedEnd, Job, JobContext

TICK_S = 10.0
RETENTION_S = 600.0


async def claim_rollups(context: JobContext) -> None:
    """Claim what is due, a bounded number, and start one run per window."""
    for job in rollups.JOBS.values():
        for claim in await rollups.claim_due(context.session, job, holder=context.holder, now=context.now):
            context.publish(ROLL_UP, *claim)


async def roll_up(context: JobContext, job: str, window_start: int, fence: int, touched: int) -> None:
    """Roll up one claimed window; a run whose claim is gone leaves nothing behind."""
    try:
        await rollups.run_claim(context.session, Claim(job, window_start, fence, touched))
    except rollups.StaleClaimError as error:
        raise ExpectedEnd(str(error)) from error


async def delete_old(context: JobContext) -> None:
    """Delete a bounded batch of what is past its time, and start over at once while there is more."""
    if await retention.delete_old(context.session, context.now):
        context.publish(RETENTION)


CLAIM_ROLLUPS = "telemetry.claim_rollups"
ROLL_UP = "telemetry.roll_up"
RETENTION = "telemetry.delete_old"

JOBS = (
    Job(CLAIM_ROLLUPS, claim_rollups, every_s=TICK_S),
    Job(ROLL_UP, roll_up),
    Job(RETENTION, delete_old, every_s=RETENTION_S),
)
