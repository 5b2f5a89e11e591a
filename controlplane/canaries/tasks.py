"""Background jobs of canaries: claiming a run when it is due, and running it.

Layer: service. A run is claimed by (window, fence) and worked off in pieces that fit one job; running twice, in two
workers or after a kill proves nothing twice (F38, F39).
"""

from __future__ import annotations

import time

from controlplane.admission.leases import Leases
from controlplane.canaries import service
from controlplane.canaries.ground import NoGroundError, ground
from controlplane.canaries.probe import UnreachableError, client
from controlplane.canaries.proof import prove
from controlplane.canaries.repository import Run
from controlplane.canaries.schemas import Cell, Proof, Verdict
from controlplane.db import transaction
from controlplane.fleet import service as fleet
from controlplane.worker import ExpectedEnd, Job, JobContext

TICK_S = 15.0
PIECE_S = 25.0
"""No new probe is begun after so long: with the longest one a job ends in time."""
MOST_CELLS = 200
REDIS_S = 2.0


async def claim_run(context: JobContext) -> None:
    """Claim the run that is due, or the rest of one, and start it."""
    settings = context.settings
    run = await service.claim(
        context.session,
        gateways=settings.probed_gateways,
        every_s=settings.canary_every_s,
        holder=context.holder,
        now=context.now,
        ready=bool(await fleet.served_models(context.session)),
    )
    if run is not None:
        context.publish(RUN, *run)


async def run_canaries(context: JobContext, window_start: int, fence: int) -> None:
    """Prove what the claimed run has not come to, as far as the time goes."""
    try:
        async with transaction(context.engine) as session:
            run = await service.begin(session, Run(window_start, fence), holder=context.holder)
            due = await service.due(session, run, MOST_CELLS)
        await _work(context, run, due)
        if not await service.end(context.session, run):
            context.publish(CLAIM)
    except service.StaleRunError as error:
        raise ExpectedEnd(str(error)) from error


async def _work(context: JobContext, run: Run, due: list[tuple[int, Cell]]) -> None:
    leases = Leases(context.redis, deadline_s=REDIS_S)
    give_up = time.monotonic() + PIECE_S
    try:
        async with ground(context.engine, leases) as prepared, client() as requests:
            silent: dict[str, str] = {}
            for canary_id, cell in due:
                if time.monotonic() > give_up:
                    return
                proof = Proof(verdict=Verdict.NOT_RUN, why=silent.get(cell.gateway, ""))
                if cell.gateway not in silent:
                    try:
                        proof = await prove(prepared, requests, cell)
                    except UnreachableError as error:
                        silent[cell.gateway] = str(error)
                        proof = Proof(verdict=Verdict.NOT_RUN, why=str(error))
                await _keep(context, run, canary_id, proof)
    except NoGroundError as error:
        for canary_id, _ in due:
            await _keep(context, run, canary_id, Proof(verdict=Verdict.NOT_RUN, why=str(error)))
    finally:
        await leases.close()


async def _keep(context: JobContext, run: Run, canary_id: int, proof: Proof) -> None:
    async with transaction(context.engine) as session:
        await service.conclude(session, run, canary_id, proof)


CLAIM = "canaries.claim"
RUN = "canaries.run"

JOBS = (
    Job(CLAIM, claim_run, every_s=TICK_S),
    Job(RUN, run_canaries),
)
"""A run that failed half-way is not retried with its old claim, which is taken over: the next tick claims the rest."""
