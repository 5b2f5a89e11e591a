"""Background job of the policy's history: keeping it bounded. Layer: service. Each run is one transaction."""

from __future__ import annotations

from controlplane.policy import service
from controlplane.worker import Job, JobContext

EVERY_S = 3600.0
BATCH = 5_000


async def forget(context: JobContext) -> None:
    """Delete a bounded batch of what is beyond what is kept, and start over at once while there is more."""
    if await service.forget(context.session, limit=BATCH) >= BATCH:
        context.publish(FORGET)


FORGET = "policy.forget"

JOBS = (Job(FORGET, forget, every_s=EVERY_S),)
