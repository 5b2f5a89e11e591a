"""What a run of canaries stands on: the probe tenant, a key made for the run, and one limit at a time.

Layer: service. Each change is a transaction of its own, because gateways must see it while the run goes on. Keys are
never stored in clear, expire by themselves and are revoked when the run ends; what a run that was killed left behind is
cleared by the next.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.admission.answers import Cold
from controlplane.admission.charges import Use, charges_for
from controlplane.admission.leases import Leases
from controlplane.canaries.schemas import Cell
from controlplane.canaries.service import NO_REPLICA
from controlplane.canaries.verdict import Limited
from controlplane.db import transaction
from controlplane.errors import NotFoundError
from controlplane.fleet import service as fleet
from controlplane.gateway.quotas import TenantLimits
from controlplane.paging import LARGEST
from controlplane.quotas import money, price_service
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import Price, QuotaLevel
from controlplane.quotas.views import QuotaPatch, QuotaSpec
from controlplane.settings import Secret
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import DEFAULT_PROJECT, PROBE_TENANT

KEY_LIVES = timedelta(minutes=10)
KEYS_KEPT_S = 86_400.0
"""How long revoked keys of runs stay in the list."""


class NoGroundError(Exception):
    """No canary can be run; the message says why."""


class Ground:
    """One run's tenant, key and model. `prices` are those of the model's pools in force."""

    def __init__(
        self,
        engine: AsyncEngine,
        leases: Leases,
        *,
        tenant_id: str,
        key: Secret,
        model: str,
        pools: tuple[str, ...],
        prices: tuple[Price, ...],
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._tenant_id = tenant_id
        self.key = key
        self.model = model
        self.pools = pools
        self.prices = prices

    def worst_money(self, read: int, written: int) -> int:
        """Micro-units that a lease takes for a request at most; 0 when nothing is charged."""
        return money.reserved(self.prices, self.pools, time.time(), money.Use(uncached_input=read, output=written))

    def costs(self, uncached: int, cached: int, output: int) -> set[int]:
        """Micro-units that an attempt with these tokens may have cost, on whichever pool it ran."""
        now, use = time.time(), money.Use(uncached_input=uncached, cached_input=cached, output=output)
        return {money.settled(self.prices, pool, now, use) for pool in self.pools}

    @asynccontextmanager
    async def limited(self, cell: Cell, hard: int) -> AsyncIterator[Limited]:
        """The cell's limit, set to `hard`, and gone at the end."""
        project = DEFAULT_PROJECT if cell.level is QuotaLevel.PROJECT else None
        key = self.key.reveal().split("_")[1] if cell.level is QuotaLevel.KEY else None
        spec = QuotaSpec(kind=cell.kind, hard=hard, project=project, key=key)
        async with transaction(self._engine) as session:
            made = await quotas.create_quota(session, PROBE_TENANT, spec)
        try:
            yield Limited(quota_id=str(made.id), level=cell.level, kind=cell.kind, hard=hard)
        finally:
            async with transaction(self._engine) as session:
                await quotas.delete_quota(session, made.id)

    async def change(self, limit: Limited, hard: int) -> Limited:
        """Set the limit to another amount."""
        async with transaction(self._engine) as session:
            changed = await quotas.change_quota(session, _uuid(limit), QuotaPatch(hard=hard))
        assert changed.hard == hard
        return msgspec.structs.replace(limit, hard=hard)

    async def used(self, limit: Limited) -> int | None:
        """What the store that all gateways share has counted against the limit; None when it does not know yet."""
        async with AsyncSession(self._engine) as session:
            known = TenantLimits(await quotas.load_tenant_quotas(session, self._tenant_id))
        charges = charges_for(self._tenant_id, [known.limit(limit.quota_id)], Use(), known.windows(time.time()))
        found = await self._leases.standings(self._tenant_id, charges)
        if isinstance(found, Cold):
            return None
        if not isinstance(found, tuple):
            raise NoGroundError("Redis does not answer")
        return found[0].used


@asynccontextmanager
async def ground(engine: AsyncEngine, leases: Leases) -> AsyncIterator[Ground]:
    """Everything a run needs, and nothing of it afterwards. Raises NoGroundError."""
    async with transaction(engine) as session:
        tenant_id = await _tenant(session)
        await _clear(session)
        model, pools = await _model(session)
        limits = await quotas.load_tenant_quotas(session, tenant_id)
        key = await tenants.create_key(
            session,
            tenant_slug=PROBE_TENANT,
            name="canary",
            expires_at=datetime.now(UTC) + KEY_LIVES,
            reserved=True,
        )
    try:
        yield Ground(engine, leases, tenant_id=tenant_id, key=key.plain, model=model, pools=pools, prices=limits.prices)
    finally:
        async with transaction(engine) as session:
            await _clear(session)


async def _tenant(session: AsyncSession) -> str:
    """The probe tenant's id; it is made by the first run."""
    try:
        found = await tenants.get_tenant(session, PROBE_TENANT)
    except NotFoundError:
        found = await tenants.create_tenant(session, slug=PROBE_TENANT, name="Canaries", reserved=True)
    if not found.active:
        raise NoGroundError(f"the tenant {PROBE_TENANT} is not active")
    return str(found.id)


async def _clear(session: AsyncSession) -> None:
    """No limit, no usable key."""
    while rows := (await quotas.list_quotas(session, PROBE_TENANT, limit=LARGEST)).items:
        for row in rows:
            await quotas.delete_quota(session, row.id)
    await tenants.retire_keys(session, PROBE_TENANT, forget_after_s=KEYS_KEPT_S)


async def _model(session: AsyncSession) -> tuple[str, tuple[str, ...]]:
    """A served model and its pools: one that is charged for, if there is any, so that money can be proven."""
    served = sorted(await fleet.served_models(session))
    if not served:
        raise NoGroundError(NO_REPLICA)
    pools = await fleet.list_pools(session)
    now, prices = time.time(), await price_service.prices_in_force(session)
    of = {model: tuple(pool.name for pool in pools if pool.model == model) for model in served}
    charged = [model for model in served if any(money.price_at(prices, pool, now) for pool in of[model])]
    model = (charged or served)[0]
    return model, of[model]


def _uuid(limit: Limited) -> UUID:
    return UUID(limit.quota_id)
