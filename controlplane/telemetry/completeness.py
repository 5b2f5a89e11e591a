"""Up to when the ledger has everything, and what is still on its way.

Layer: service. Three small queries. A record lies in exactly one of these places before it is a row: with its replica
until a report takes it, in a gateway's spool, or held for the replica's own count. Nothing here guesses what a reporter
that is silent still has.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.fleet import service as fleet
from controlplane.ledger import service as ledger
from controlplane.telemetry import repository
from controlplane.telemetry.schemas import Completeness, GatewaySpool

LIVE_S = 15.0
"""A gateway that has been silent for longer has stopped: what it had not spooled, replicas tell."""
WAITED_FOR_S = 600.0
"""What a stopped gateway has on its disk is waited for this long; it comes with its next start."""


async def completeness(session: AsyncSession, now: float) -> Completeness:
    """As of `now` by this process's clock."""
    held = await ledger.held_now(session)
    spools = await repository.gateway_spools(session)
    told = await fleet.oldest_usage_told(session)
    moments = [at for at in (held.oldest, told, *(_told_by(one, now) for one in spools)) if at is not None]
    return Completeness(complete_until=min([now, *moments]), held=held.attempts, gateways=spools)


def _told_by(spool: GatewaySpool, now: float) -> float | None:
    """Up to when a gateway's records have all come; None for one that is not waited for."""
    if spool.oldest_at is not None and spool.heard_at > now - WAITED_FOR_S:
        return spool.oldest_at
    return spool.heard_at if spool.heard_at > now - LIVE_S else None
