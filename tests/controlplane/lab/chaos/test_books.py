"""Where limits stand, read from a store that holds them."""

from __future__ import annotations

import time

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.answers import Granted
from controlplane.admission.charges import Use, charges_for
from controlplane.admission.leases import Leases
from controlplane.db import transaction
from controlplane.gateway.quotas import TenantLimits
from controlplane.lab.chaos import books
from controlplane.quotas import service
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import QuotaSpec
from controlplane.settings import Settings
from tests.factories.rows import make_tenant


async def test_limits_that_count_are_read_and_those_of_a_size_are_not(
    settings: Settings, committed_engine: AsyncEngine, redis: Redis
) -> None:
    async with transaction(committed_engine) as session:
        tenant = await make_tenant(session)
        for kind, hard in ((QuotaKind.MAX_PROMPT_TOKENS, 7), (QuotaKind.CONCURRENT_REQUESTS, 5)):
            await service.create_quota(session, tenant.slug, QuotaSpec(kind=kind, hard=hard))
        quotas = await service.load_tenant_quotas(session, str(tenant.id))
    leases = Leases(redis, deadline_s=books.DEADLINE_S)
    limits = TenantLimits(quotas)
    charges = charges_for(str(tenant.id), quotas.limits, Use(requests=1), limits.windows(time.time()))
    assert isinstance(await leases.acquire(str(tenant.id), "held", charges), Granted)
    (standing,) = await books.standings(settings)
    await leases.close()
    assert (standing.used, standing.limit, standing.concurrent) == (1, 5, True)
    assert standing.name == f"{QuotaKind.CONCURRENT_REQUESTS.value} of {str(tenant.id)[:8]}"
