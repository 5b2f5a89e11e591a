"""Turns what gateways counted into rows once no replica will count it any more.

Layer: service. One transaction at a time over all control planes (an advisory lock); a run that finds nothing due, or
another at it, has done its part. It never decides what is due: the service does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.ledger import service
from controlplane.outage import away
from dataplane.protocol import UsageRecord

log = logging.getLogger("tidegate.ledger")

EVERY_S = 2.0


class HeldSettler:
    """`run` goes on until cancelled, whatever is away."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        on_stored: Callable[[Sequence[UsageRecord]], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        every_s: float = EVERY_S,
    ) -> None:
        self._engine = engine
        self._on_stored = on_stored
        self._clock = clock
        self._every_s = every_s

    async def run(self) -> None:
        while True:
            try:
                while await self.settle() >= service.SETTLED_AT_ONCE:
                    pass
            except Exception as error:
                if away(error) is None:
                    log.exception("held usage could not be settled")
            await asyncio.sleep(self._every_s)

    async def settle(self) -> int:
        """Store what is due now, a bounded number; how many attempts became rows."""
        async with transaction(self._engine) as session:
            stored = await service.settle_held(session, self._clock()) or []
        if stored:
            log.info("%d attempts are in the ledger by their gateway's count", len(stored))
            self._on_stored(stored)
        return len(stored)
