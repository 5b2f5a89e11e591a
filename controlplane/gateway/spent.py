"""What the ledger has of a limit's day or month, for a store that has forgotten it.

Layer: service. Five queries at most. It must never be asked while the store knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.admission.answers import ColdCounter
from controlplane.ledger.service import sum_since
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel
from controlplane.telemetry.completeness import completeness
from controlplane.tenants.schemas import KeyGrant

LEDGER_LAG_S = 10.0
"""Usage is in the ledger this long after its attempt ended: a report's interval, its way, and one repeat. After an
outage it takes longer, and reporters say so; what one that is silent still has is missing from the counter."""
_TOKENS = frozenset({QuotaKind.TOKENS_PER_DAY, QuotaKind.TOKENS_PER_MONTH})


class LedgerSums:
    """Sums on `engine`. The caller bounds the time."""

    def __init__(self, engine: AsyncEngine, wall: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._wall = wall

    async def __call__(self, grant: KeyGrant, limit: Limit, counter: ColdCounter) -> tuple[int, float]:
        """Units of `limit` in the counter's window, and the time until which the ledger surely had all. `grant` is of
        a request that the limit concerns, and so names its tenant and project.
        """
        now = self._wall()
        since, until = (datetime.fromtimestamp(at, UTC) for at in (counter.start, counter.stop))
        async with AsyncSession(self._engine) as session:
            used = await sum_since(
                session,
                tenant=grant.tenant,
                project=grant.project if limit.level is QuotaLevel.PROJECT else None,
                key_identity=limit.scope_id if limit.level is QuotaLevel.KEY else None,
                model=limit.model or None,
                since=since,
                until=until,
                with_held=True,
            )
            told = (await completeness(session, now)).complete_until
        units = used.prompt_tokens + used.output_tokens if limit.kind in _TOKENS else used.cost
        return units, min(told, now - LEDGER_LAG_S)
