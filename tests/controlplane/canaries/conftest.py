"""A whole gateway on real stores with a replica that keeps to `max_tokens`, and what a run of canaries needs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from controlplane.admission.leases import Leases
from controlplane.canaries.ground import Ground, ground
from controlplane.canaries.probe import client
from controlplane.canaries.proof import prove
from controlplane.canaries.schemas import Cell, Proof
from controlplane.db import transaction
from controlplane.quotas import price_service
from controlplane.quotas.schemas import QuotaKind, QuotaLevel
from controlplane.quotas.views import PriceSpec
from controlplane.redis_client import create_redis
from controlplane.settings import Settings
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.deployment import Accounts, Deployed, deployed_gateway
from tests.controlplane.gateway.replicas import DONE, FakeReplica, chunk, event, fake_replica, usage_chunk

PRICE = PriceSpec(uncached_input=2_000_000, cached_input=1_000_000, output=8_000_000, device_second=0)
PROMPT = 20


def usage_of(output: int) -> dict[str, object]:
    return {
        "prompt_tokens": PROMPT,
        "completion_tokens": output,
        "total_tokens": PROMPT + output,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def engine(request: web.Request, body: bytes) -> web.StreamResponse:
    """As many tokens as were asked for; a streamed one takes a few milliseconds."""
    wanted = json.loads(body)
    output = wanted["max_tokens"]
    if not wanted.get("stream"):
        return web.json_response({**replicas.COMPLETION, "usage": usage_of(output)})
    response = await replicas.start_stream(request)
    for _ in range(output):
        await response.write(event(chunk("x")))
        await asyncio.sleep(0.02)
    for piece in (event(chunk(finish="length")), event(usage_chunk(usage_of(output))), DONE):
        await response.write(piece)
    return response


@dataclass
class Site:
    """A gateway to be probed."""

    settings: Settings
    gateway: Deployed
    replica: FakeReplica
    accounts: Accounts

    def cell(self, kind: QuotaKind, level: QuotaLevel = QuotaLevel.KEY, endpoint: str = "/chat/completions") -> Cell:
        return Cell(gateway=self.gateway.url, endpoint=endpoint, level=level, kind=kind)

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[tuple[Ground, aiohttp.ClientSession]]:
        redis = create_redis(self.settings.redis_url)
        leases = Leases(redis, deadline_s=5.0)
        try:
            async with ground(self.accounts.engine, leases) as prepared, client() as requests:
                yield prepared, requests
        finally:
            await leases.close()
            await redis.aclose()

    async def prove(self, *cells: Cell) -> list[Proof]:
        async with self.prepared() as (prepared, requests):
            return [await prove(prepared, requests, cell) for cell in cells]

    async def price(self) -> None:
        async with transaction(self.accounts.engine) as session:
            await price_service.set_price(session, PRICE, by="ada")


@pytest.fixture
async def site(settings: Settings) -> AsyncIterator[Site]:
    wide = structs.replace(settings, lease_deadline_ms=5_000)
    accounts = Accounts(wide)
    await accounts.pool("pool-m", "m")
    async with fake_replica(engine) as replica:
        await accounts.replica("r0", "pool-m", replica.url)
        async with deployed_gateway(wide) as gateway:
            yield Site(wide, gateway, replica, accounts)
    await accounts.close()
