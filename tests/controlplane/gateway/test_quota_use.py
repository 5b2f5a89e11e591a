"""A tenant's look at its limits also rights what a gateway that died left reserved (F14)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from redis.asyncio import Redis

from controlplane.admission.answers import Cold, ColdCounter, Granted
from controlplane.admission.charges import Charge, Use, charges_for
from controlplane.admission.warm import CORRECTED_EVERY_S
from controlplane.gateway.quota_use import LimitUse, UseReader
from controlplane.gateway.quotas import TenantLimits
from controlplane.quotas.schemas import Limit, TenantQuotas
from controlplane.tenants.schemas import KeyGrant
from tests.controlplane.admission.leasing import DAY_S, MONTHLY, TENANT, World, limit

MONTH = limit(MONTHLY, 1000)
GRANT = KeyGrant(
    key_id="k", secret_hash=b"", tenant_id=TENANT, tenant="acme", cache_salt="s", allowed_models=None, revoked=False,
    tenant_active=True,
)  # fmt: skip


@pytest.fixture
def tenant() -> TenantLimits:
    return TenantLimits(
        TenantQuotas(tenant_id=TENANT, tenant="acme", time_zone="UTC", limits=(MONTH,), prices=(), epoch=1)
    )


@pytest.fixture
async def world(redis: Redis, tenant: TenantLimits) -> World:
    """A month that has just begun, all of it used by a request whose gateway died; then nine quiet days."""
    world = await World(redis, ttl_s=30).start()
    await world.advance(tenant.windows(world.now).month[1] - world.now + 60)

    def charges(units: int) -> tuple[Charge, ...]:
        return charges_for(TENANT, [MONTH], Use(input=units), tenant.windows(world.now))

    found = await world.leases.standings(TENANT, charges(0))
    assert isinstance(found, Cold)
    assert await world.leases.hydrate(TENANT, found.counters[0], 100, complete_until=world.now) is True
    assert isinstance(await world.leases.acquire(TENANT, "dead", charges(900)), Granted)
    await world.advance(9 * DAY_S)
    return world


async def test_f14_a_look_at_ones_limits_rights_what_a_dead_gateway_left_of_a_month(
    world: World, tenant: TenantLimits
) -> None:
    asked: list[tuple[str, str, ColdCounter]] = []
    waits: list[tuple[float, Callable[[], object]]] = []

    async def ledger(grant: KeyGrant, counted: Limit, counter: ColdCounter) -> tuple[int, float]:
        asked.append((grant.tenant, counted.quota_id, counter))
        return 150, world.now

    def later(seconds: float, call: Callable[..., object], *arguments: object) -> None:
        waits.append((seconds, partial(call, *arguments)))

    at = 0.0
    reader = UseReader(world.leases, ledger, wall=lambda: world.now)
    reader._warmer._later = later
    reader._warmer._monotonic = lambda: at

    async def look() -> LimitUse:
        return (await reader.of(GRANT, tenant, [MONTH]))[MONTH.quota_id]

    assert (await look()).total == 1000
    await look()
    assert asked == [], "the ledger is not summed before usage had time to come"
    [(seconds, call)] = waits
    assert seconds == CORRECTED_EVERY_S
    at += seconds
    call()
    await asyncio.gather(*reader._warmer._under_way.values())
    [(name, quota_id, span)] = asked
    assert (name, quota_id, span.start) == ("acme", MONTH.quota_id, tenant.windows(world.now).month[0])
    assert (await look()).total == 150
    assert len(waits) == 1


@pytest.mark.parametrize("behind_s", [0.4, 0.0004, -0.4])
async def test_a_month_ends_at_its_own_end_by_whatever_clock_it_is_looked_at(
    world: World, tenant: TenantLimits, behind_s: float
) -> None:
    async def ledger(grant: KeyGrant, counted: Limit, counter: ColdCounter) -> tuple[int, float]:
        raise AssertionError("the store knows")

    reader = UseReader(world.leases, ledger, wall=lambda: world.now - behind_s)
    found = (await reader.of(GRANT, tenant, [MONTH]))[MONTH.quota_id]
    assert found.resets_at == tenant.windows(world.now).month[1]
