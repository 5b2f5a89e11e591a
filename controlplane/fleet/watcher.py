"""Looks at replicas exactly when the next one may have fallen silent.

Layer: service. A background task of the control plane. It sets one timer to the next deadline and never polls; a
look costs one query. Time during which Postgres could not be reached, or this process did not run, is no
replica's silence: nobody could have been heard.
"""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.fleet import repository, service
from controlplane.fleet.liveness import Limits
from controlplane.outage import away

log = logging.getLogger("tidegate.fleet")

AFTER_DEADLINE_S = 0.05
"""A look comes this long after the deadline, so that it falls behind it by every clock involved."""


class Watcher:
    """One control-plane process's look-out. Any number of them may run on one database."""

    def __init__(self, engine: AsyncEngine, limits: Limits) -> None:
        self._engine = engine
        self._limits = limits
        self._listening_since: float | None = None

    async def look(self) -> float:
        """Conclude STALE and LOST as of now; returns seconds until the next look. Raises what the driver raises."""
        async with transaction(self._engine) as session:
            now = await repository.database_clock(session)
            if self._listening_since is None:
                self._listening_since = now
            return await service.conclude(session, self._listening_since, now, self._limits)

    def deafen(self) -> None:
        """Silence so far does not count: begin to listen anew at the next look."""
        self._listening_since = None

    async def run(self) -> None:
        """Look out until cancelled; a database that is away is tried again after STALE's span."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                pause_s = await self.look() + AFTER_DEADLINE_S
            except Exception as error:
                self.deafen()
                if away(error) is None:
                    raise
                log.warning("replicas could not be looked at: %s", type(error).__name__)
                pause_s = self._limits.stale_after_s
            due = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            if loop.time() - due > self._limits.stale_after_s:
                self.deafen()
