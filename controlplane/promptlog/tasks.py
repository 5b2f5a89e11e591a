"""Background job of the request log: forgetting. Layer: service. Running twice deletes nothing more (F38, F39)."""

from __future__ import annotations

from controlplane.promptlog import service
from controlplane.worker import Job, JobContext

FORGET_S = 300.0
BATCH = 5_000


async def forget(context: JobContext) -> None:
    """Delete a bounded batch, and start over at once while there is more."""
    if await service.forget(context.session, context.now, limit=BATCH) >= BATCH:
        context.publish(FORGET)


FORGET = "promptlog.forget"
JOBS = (Job(FORGET, forget, every_s=FORGET_S),)
