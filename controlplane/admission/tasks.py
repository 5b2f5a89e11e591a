"""Background jobs of admission: planning shares. Layer: service. Each run is one transaction."""

from __future__ import annotations

from controlplane.admission.planner import WINDOW_S, plan_pools
from controlplane.worker import ExpectedEnd, Job, JobContext


async def plan_shares(context: JobContext) -> None:
    """Plan each pool's current window, unless somebody has."""
    if not await plan_pools(context.session, context.redis, context.now):
        raise ExpectedEnd("this window is planned, or there is no pool")


PLAN_SHARES = "admission.plan_shares"

JOBS = (Job(PLAN_SHARES, plan_shares, every_s=float(WINDOW_S)),)
