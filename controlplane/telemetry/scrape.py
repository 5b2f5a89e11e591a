"""The gauges of /metrics that live in the database, and the names that may be label values.

Layer: service. Reads, never writes. A scrape never fails because the database is away and never asks it more than
every few seconds, however many scrape.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from controlplane.canaries import service as canaries
from controlplane.component import Resources
from controlplane.db import transaction
from controlplane.fleet import service as fleet
from controlplane.fleet.live import LoadPublisher
from controlplane.ledger import service as ledger
from controlplane.outage import away
from controlplane.paging import LARGEST
from controlplane.telemetry import rollups
from controlplane.telemetry.completeness import completeness
from controlplane.telemetry.labels import MAX_KNOWN, KnownLabels
from controlplane.telemetry.metrics import IntakeMetrics
from controlplane.telemetry.taskstats import TaskStats
from controlplane.tenants import service as tenants

log = logging.getLogger("tidegate.telemetry")

FRESH_S = 5.0
"""Gauges read from the database are at most this old."""
TIMEOUT_S = 5.0
LEARN_PAUSE_S = 5.0
"""An unknown name is looked up at most this often."""


class DatabaseGauges:
    """One process's gauges; concurrent scrapes share one look."""

    def __init__(
        self,
        resources: Resources,
        metrics: IntakeMetrics,
        publisher: LoadPublisher,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._resources = resources
        self._metrics = metrics
        self._publisher = publisher
        self._tasks = TaskStats(resources.redis)
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at = 0.0

    async def refresh(self) -> None:
        """Bring the gauges up to date, unless they are fresh or the database is away."""
        async with self._lock:
            if self._read_at and time.monotonic() - self._read_at < FRESH_S:
                return
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._read()
            except Exception as error:
                if away(error) is None:
                    raise
                log.warning("gauges of the database are not current: %s", type(error).__name__)
            self._read_at = time.monotonic()

    async def _read(self) -> None:
        metrics = self._metrics
        metrics.shown.loads_published = self._publisher.sent
        metrics.shown.load_failures = self._publisher.failures
        async with transaction(self._resources.engine) as session:
            metrics.show_replicas(await fleet.count_by_state(session))
            for job, lag_s in (await rollups.lags(session, self._clock())).items():
                metrics.rollup_lag.labels(job).set(lag_s)
            every_s = self._resources.settings.canary_every_s
            metrics.show_canaries(await canaries.all_canaries(session, every_s=every_s))
            metrics.ledger_rows.set(await ledger.estimated_rows(session))
            usage = await completeness(session, self._clock())
            metrics.usage_held.set(usage.held)
            metrics.usage_complete_until.set(usage.complete_until)
        metrics.shown.tasks = await self._tasks.read()


class LabelLearner:
    """Keeps `KnownLabels` current: at start, and soon after a name was asked for that is not known."""

    def __init__(self, resources: Resources, labels: KnownLabels) -> None:
        self._resources = resources
        self._labels = labels
        self._wanted = asyncio.Event()
        self._wanted.set()
        labels.on_unknown = self._wanted.set

    async def run(self) -> None:
        """Learn until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.learn()
            except Exception as error:
                if away(error) is None:
                    raise
                self._wanted.set()
            await asyncio.sleep(LEARN_PAUSE_S)

    async def learn(self) -> None:
        """Read the names of all tenants and models, up to what `KnownLabels` holds."""
        slugs: list[str] = []
        after: str | None = None
        async with transaction(self._resources.engine) as session:
            models = {pool.model for pool in await fleet.list_pools(session)}
            while len(slugs) < MAX_KNOWN:
                page = await tenants.list_tenants(session, after=after, limit=LARGEST)
                slugs += [tenant.slug for tenant in page.items]
                after = page.next
                if after is None:
                    break
        self._labels.learn(tenants=slugs, models=models)
