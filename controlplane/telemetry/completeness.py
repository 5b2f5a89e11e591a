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
from controlplane.telemetry.schemas import Completeness

HEARD_WITHIN_S = 600.0
"""A gateway that has been silent for longer is not waited for: what it has comes with its next start."""


async def completeness(session: AsyncSession, now: float) -> Completeness:
    """As of `now` by this process's clock."""
    held = await ledger.held_now(session)
    spools = await repository.gateway_spools(session)
    told = await fleet.oldest_usage_told(session)
    heard = [one for one in spools if one.heard_at > now - HEARD_WITHIN_S]
    moments = [now, *(one.heard_at if one.oldest_at is None else one.oldest_at for one in heard)]
    moments += [at for at in (held.oldest, told) if at is not None]
    return Completeness(complete_until=min(moments), held=held.attempts, gateways=spools)
