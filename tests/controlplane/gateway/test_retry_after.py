"""Retry-After on real gateways and the real clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import ExitStack

import aiohttp
from msgspec import structs
from redis.asyncio import Redis

from controlplane.admission import scripts
from controlplane.admission.answers import Granted
from controlplane.admission.charges import Use, Windows, charges_for
from controlplane.admission.leases import Leases
from controlplane.db import transaction
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import QuotaSpec
from controlplane.settings import Settings
from tests.controlplane.gateway.deployment import Accounts
from tests.controlplane.gateway.harness import CHAT
from tests.controlplane.gateway.replicas import fake_replica
from tests.controlplane.test_serve import serving

EARLIER_S = 57.0
EARLIER = (
    "local function server_time() local time = redis.call('TIME') "
    f"return (tonumber(time[1]) - {EARLIER_S:.0f}) * 1000000 + tonumber(time[2]) end\n"
)
DEADLINE_MS = 5_000


async def test_f11_waiting_exactly_so_long_passes_through_four_gateway_processes(
    settings: Settings, redis: Redis
) -> None:
    accounts = Accounts(settings)
    await accounts.pool("pool-m", "m")
    await accounts.tenant("minute")
    async with transaction(accounts.engine) as session:
        await quotas.create_quota(session, "minute", QuotaSpec(kind=QuotaKind.REQUESTS_PER_MINUTE, hard=12))
    key = await accounts.key("minute")
    async with fake_replica() as replica, aiohttp.ClientSession() as client:
        await accounts.replica("r0", "pool-m", replica.url)
        with ExitStack() as stack:
            ports = [
                stack.enter_context(
                    serving(
                        "gateway",
                        structs.replace(settings, home=settings.home / str(number)),
                        TIDEGATE_LEASE_DEADLINE_MS=str(DEADLINE_MS),
                    )
                )[1]
                for number in range(4)
            ]
            await _use_up(redis, accounts, 12)
            turns = itertools.cycle(ports)

            async def ask() -> tuple[int, str]:
                url = f"http://127.0.0.1:{next(turns)}/v1/chat/completions"
                headers = {"authorization": f"Bearer {key}"}
                async with client.post(url, data=json.dumps(CHAT), headers=headers) as response:
                    await response.read()
                    return response.status, response.headers.get("retry-after", "")

            answers = await asyncio.gather(*(ask() for _ in range(8)))
            assert {status for status, _ in answers} == {429}
            waits = [int(wait) for _, wait in answers]
            assert all(1 <= wait <= 60 - EARLIER_S + 1 for wait in waits), waits
            asked = time.monotonic()
            await asyncio.sleep(max(waits))
            assert time.monotonic() - asked >= max(waits)
            assert {status for status, _ in await asyncio.gather(*(ask() for _ in range(8)))} == {200}
    await accounts.close()


async def _use_up(redis: Redis, accounts: Accounts, requests: int) -> None:
    """Take leases `EARLIER_S` ago by the store's clock."""
    async with transaction(accounts.engine) as session:
        (tenant,) = await quotas.load_quotas(session, after_id="")
    leases = Leases(redis, lua=scripts.register(redis, EARLIER), deadline_s=DEADLINE_MS / 1000)
    nowhen = Windows(day=(0, 1, 2), month=(0, 1, 2))
    charges = charges_for(tenant.tenant_id, tenant.limits, Use(), nowhen)
    # all at one moment, as far as can be: whoever is told to wait is told when the first of them no longer counts
    taken = await asyncio.gather(
        *(leases.acquire(tenant.tenant_id, f"earlier-{number}", charges) for number in range(requests))
    )
    for outcome in taken:
        assert isinstance(outcome, Granted)
        await leases.settle(outcome.lease, Use())
    await leases.close()
