"""Plugs the gateway into the application.

Layer: service. Wires the parts, starts and stops their background work. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar, asgi
from litestar.handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admission.leases import Leases
from controlplane.admission.service import load_plans
from controlplane.admission.shares import SharePlan
from controlplane.background import kept
from controlplane.component import Component, Resources
from controlplane.errors import NotFoundError
from controlplane.fleet.schemas import FleetView
from controlplane.fleet.service import load_fleet
from controlplane.gateway.auth import CAPACITY as MOST_KEYS
from controlplane.gateway.auth import KeyDirectory
from controlplane.gateway.dispatch import Dispatch
from controlplane.gateway.dispatch_metrics import DispatchMetrics
from controlplane.gateway.endpoint import Endpoint
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.gateway import Gateway
from controlplane.gateway.lease_metrics import LeaseCollector
from controlplane.gateway.load_feed import LoadFeed
from controlplane.gateway.loads import LoadBoard
from controlplane.gateway.metering import Meter
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.policy import PolicyFeed
from controlplane.gateway.prefetch import Prefetch
from controlplane.gateway.prompt_log import PromptLog
from controlplane.gateway.quota_desk import QuotaDesk
from controlplane.gateway.quota_routes import QuotaRoutes
from controlplane.gateway.quota_use import UseReader
from controlplane.gateway.quotas import CAPACITY as MOST_TENANTS
from controlplane.gateway.quotas import QuotaDirectory
from controlplane.gateway.reporter import GatewayReporter
from controlplane.gateway.request_log import RequestLog
from controlplane.gateway.shutdown import drain_on_signal
from controlplane.gateway.snapshot import SnapshotFile, SnapshotKeeper
from controlplane.gateway.spent import LedgerSums
from controlplane.gateway.table import PolicyTable
from controlplane.gateway.telemetry import Recorder
from controlplane.gateway.usage import UsageLog
from controlplane.gateway.usage_metrics import UsageCollector
from controlplane.quotas.schemas import TenantQuotas
from controlplane.quotas.service import load_quotas, load_tenant_quotas
from controlplane.redis_pipe import ScriptPipe
from controlplane.slo.schemas import Slo
from controlplane.slo.service import load_slos
from controlplane.tenants.schemas import KeyGrant
from controlplane.tenants.service import load_key, load_keys

FIRST_READ_S = 2.0
"""Longest a start waits for Postgres before it serves from the snapshot alone."""


def component(resources: Resources) -> Component:
    """The routes under /v1 and the work behind them."""
    parts = _Parts(resources)
    endpoint = Endpoint(parts.gateway, parts.quota_routes)
    return Component(
        routes=[mount(parts.gateway, parts.quota_routes)],
        lifespans=[parts.lifespan],
        state={"gateway": parts.gateway},
        direct=("/v1/", endpoint),
    )


def mount(gateway: Gateway, quotas: QuotaRoutes | None = None) -> ASGIRouteHandler:
    """The route of everything below /v1."""
    endpoint = Endpoint(gateway, quotas)

    @asgi("/v1", is_mount=True, copy_scope=False)
    async def v1(scope: Scope, receive: Receive, send: Send) -> None:
        await endpoint(scope, receive, send)

    return v1


class _Parts:
    """One gateway process's parts and their background work."""

    def __init__(self, resources: Resources) -> None:
        settings = resources.settings
        folder = settings.home / "gateway" / settings.gateway_id
        self._resources = resources
        changed = asyncio.Event()
        board = LoadBoard(settings.stale_after_s)

        def on_view(view: FleetView) -> None:
            board.retain(route.replica for route in view.replicas)
            dispatch.fleet_changed()
            changed.set()

        metrics = GatewayMetrics(resources.registry)
        self._recorder = Recorder()
        self._request_log = RequestLog(folder / "requests.jsonl", on_dropped=metrics.log_lines_dropped.inc)
        self._usage = UsageLog(
            folder / "usage",
            resources.redis,
            gateway=settings.gateway_id,
            max_bytes=settings.usage_spool_bytes,
        )
        UsageCollector(self._usage, resources.registry)
        self._keys = KeyDirectory(self._load_grant, on_learned=changed.set)
        self._quotas = QuotaDirectory(self._load_tenant_quotas, on_learned=changed.set)
        self._fleet = FleetDirectory(self._load_fleet, on_view)
        self._pipe = ScriptPipe(settings.redis_url)
        dispatch = Dispatch(
            resources.redis, self._pipe, settings, self._fleet, board, metrics=DispatchMetrics(resources.registry)
        )
        self._slos = PolicyTable("slos", self._load_slos, dispatch.adopt_slos, on_learned=changed.set)
        self._plans = PolicyTable("share_plans", self._load_plans, dispatch.adopt_plans)
        self._prefetch_keys = Prefetch(
            "API keys", self._load_keys, self._keys.adopt, lambda grant: grant.key_id, MOST_KEYS
        )
        self._prefetch_quotas = Prefetch(
            "Quotas", self._load_quotas, self._quotas.adopt, lambda quotas: quotas.tenant_id, MOST_TENANTS
        )
        self._feed = PolicyFeed(
            settings.database_url,
            [
                self._keys,
                self._quotas,
                self._fleet,
                self._prefetch_keys,
                self._prefetch_quotas,
                self._slos,
                self._plans,
            ],
        )
        self._leases = Leases(self._pipe, deadline_s=settings.lease_deadline_ms / 1000, ttl_s=settings.lease_ttl_s)
        LeaseCollector(self._leases, resources.registry)
        self._loads = LoadFeed(resources.redis, self._fleet, board)
        self._snapshot = SnapshotKeeper(
            SnapshotFile(folder / "policy.snapshot", settings.gateway_id, settings.session_secret),
            keys=self._keys,
            fleet=self._fleet,
            quotas=self._quotas,
            slos=self._slos,
            changed=changed,
        )
        self.gateway = Gateway(
            settings,
            keys=self._keys,
            fleet=self._fleet,
            meter=Meter(
                self._leases,
                self._quotas,
                self._fleet,
                LedgerSums(resources.engine),
                assumed_context=settings.assumed_context,
                on_refused=metrics.quota_refused,
            ),
            board=board,
            recorder=self._recorder,
            request_log=self._request_log,
            usage=self._usage,
            metrics=metrics,
            prompt_log=PromptLog(
                settings, on_delivered=metrics.prompts_logged.inc, on_dropped=metrics.prompts_dropped.inc
            ),
            dispatch=dispatch,
        )
        self.quota_routes = QuotaRoutes(
            self._quotas, UseReader(self._leases, LedgerSums(resources.engine)), QuotaDesk(resources.engine)
        )
        self._reporter = GatewayReporter(
            settings,
            self._recorder,
            in_flight=lambda: self.gateway.in_flight,
            spool=self._usage.state,
            policy_epoch=lambda: max(self._feed.epoch, self._fleet.view.epoch if self._fleet.view else 0),
        )
        metrics.observe(
            in_flight=lambda: float(self.gateway.in_flight),
            listening=lambda: float(self._feed.listening),
            ready_replicas=lambda: float(self._fleet.ready()),
        )

    @asynccontextmanager
    async def lifespan(self, app: Litestar) -> AsyncIterator[None]:
        """Serve from the snapshot, then from Postgres; at the end finish what runs, then report it."""
        self._usage.open()
        self._snapshot.restore()
        self.gateway.open()
        work = [
            asyncio.create_task(kept(name, run), name=f"gateway {name}")
            for name, run in (
                ("policy feed", self._feed.run),
                ("key prefetch", self._prefetch_keys.run),
                ("quota prefetch", self._prefetch_quotas.run),
                ("leases", self._leases.run),
                ("objectives", self._slos.run),
                ("share plans", self._plans.run),
                ("load feed", self._loads.run),
                ("snapshot", self._snapshot.run),
                ("request log", self._request_log.run),
                ("prompt log", self.gateway.prompt_log.run),
                ("usage shipper", self._usage.run),
                ("reporter", self._reporter.run),
            )
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await self._fleet.refresh()
        work.append(asyncio.create_task(kept("fleet", self._fleet.run), name="gateway fleet"))
        try:
            with drain_on_signal(self.gateway):
                yield
        finally:
            await self.gateway.drain()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await asyncio.gather(
                self._request_log.flush(),
                self._reporter.last_words(),
                self.gateway.prompt_log.last_words(),
                asyncio.to_thread(self._snapshot.save, self._snapshot.snapshot()),
            )
            await self._usage.close()
            await self._leases.close()
            await self._keys.close()
            await self._quotas.close()
            await self.gateway.close()
            await self._pipe.close()

    async def _load_grant(self, key_id: str) -> KeyGrant | None:
        async with AsyncSession(self._resources.engine) as session:
            return await load_key(session, key_id)

    async def _load_tenant_quotas(self, tenant_id: str) -> TenantQuotas | None:
        async with AsyncSession(self._resources.engine) as session:
            try:
                return await load_tenant_quotas(session, tenant_id)
            except NotFoundError:
                return None

    async def _load_quotas(self, after: str) -> list[TenantQuotas]:
        async with AsyncSession(self._resources.engine) as session:
            return await load_quotas(session, after_id=after)

    async def _load_fleet(self) -> FleetView:
        async with AsyncSession(self._resources.engine) as session:
            return await load_fleet(session)

    async def _load_slos(self) -> tuple[Slo, ...]:
        async with AsyncSession(self._resources.engine) as session:
            return await load_slos(session)

    async def _load_plans(self) -> list[SharePlan]:
        async with AsyncSession(self._resources.engine) as session:
            return await load_plans(session)

    async def _load_keys(self, after: str) -> list[KeyGrant]:
        async with AsyncSession(self._resources.engine) as session:
            return await load_keys(session, after_id=after)
