"""Gateways whose tenants have limits, on a real Redis, and what their answers say of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
from aiohttp import web

from controlplane.admission.answers import Cold
from controlplane.admission.charges import Use, charges_for
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import CHAT, STREAM, Running
from tests.controlplane.gateway.replicas import DONE, chunk, event, usage_chunk

RPM, TPM = QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.TOKENS_PER_MINUTE
IN, OUT = QuotaKind.INPUT_TOKENS_PER_MINUTE, QuotaKind.OUTPUT_TOKENS_PER_MINUTE
CONCURRENT, DAY, MONEY = QuotaKind.CONCURRENT_REQUESTS, QuotaKind.TOKENS_PER_DAY, QuotaKind.MONEY_PER_DAY
LARGE = 1_000_000
TENANT = "tenant-id-acme"
ASK = {**CHAT, "max_tokens": 100}
ASK_STREAM = {**STREAM, "max_tokens": 100}
USED = 15
"""Tokens that a fake replica says an answer took, 12 of them the prompt's."""


def limit(kind: QuotaKind, hard: int | None, **changes: Any) -> Limit:
    values: dict[str, Any] = {
        "quota_id": f"q-{kind.value}",
        "level": QuotaLevel.TENANT,
        "scope_id": TENANT,
        "model": "",
        "kind": kind,
        "hard": hard,
    }
    return Limit(**{**values, **changes})


async def used(served: Running, one: Limit) -> int:
    """What the store has counted against a limit."""
    tenant = await served.gateway.meter.quotas.of(TENANT)
    charges = charges_for(TENANT, [one], Use(), tenant.windows(time.time()))
    found = await served.gateway.meter.leases.standings(TENANT, charges)
    assert not isinstance(found, Cold)
    assert isinstance(found, tuple), found
    return found[0].used


async def all_settled(served: Running, within_s: float = 20.0) -> None:
    """Wait until the process holds no lease and owes the store no ending."""
    leases = served.gateway.meter.leases
    async with asyncio.timeout(within_s):
        while served.gateway.in_flight or leases.in_flight or leases.deferred:
            await asyncio.sleep(0.01)


async def answer_of(
    served: Running, body: dict[str, object] = ASK, **options: Any
) -> tuple[int, str, aiohttp.ClientResponse]:
    """Status, error code ("" when served) and the response, read to its end."""
    async with served.post(body, **options) as response:
        raw = await response.read()
        if response.status == 200:
            return 200, "", response
        return response.status, (await response.json())["error"]["code"] if raw else "", response


class Gate:
    """A replica that streams one token, then waits to be let on; it says what usage it was told to say."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def behave(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = await replicas.start_stream(request)
        await response.write(event(chunk("a")))
        await self.open.wait()
        for piece in (event(chunk(finish="stop")), event(usage_chunk()), DONE):
            await response.write(piece)
        return response
