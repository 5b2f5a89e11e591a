"""The fairness bench's own parts: the engine's service time, what is counted, and shares through four gateways."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from msgspec import structs
from redis.asyncio import Redis

from controlplane.lab.bench.batching_engine import Replica, Speed
from controlplane.lab.bench.fair_load import Ask, Heard, Load, largest_gap, vtc_bound
from controlplane.settings import Secret, Settings
from tests.controlplane.gateway.harness import Running, route, running_gateway
from tests.services import free_port

SPEED = Speed(step_s=0.01, token_s=1e-5, budget=256, slots=4)
TENANTS = {"light": 1.0, "heavy": 3.0, "polite": 1.0}


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[tuple[str, Replica]]:
    replica = Replica("m", SPEED)
    runner = web.AppRunner(replica.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    steps = asyncio.create_task(replica.batcher.run())
    try:
        yield f"http://127.0.0.1:{port}", replica
    finally:
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        await runner.cleanup()


async def test_the_engine_takes_the_time_its_tokens_cost_and_holds_no_more_than_its_slots() -> None:
    async with engine() as (url, replica), Load([url], "m") as load:
        load.flood(Ask("t", "key", 300, 20), 10)
        await asyncio.sleep(0.2)
        assert len(replica.batcher.running) == SPEED.slots
        assert len(replica.batcher.waiting) == 6
        async with asyncio.timeout(20):
            while len(load.heard["t"].ttft) < 4:
                await asyncio.sleep(0.01)
        least = 2 * SPEED.step_s + 300 * SPEED.token_s  # two steps of prefill
        assert min(ttft for _, ttft in load.heard["t"].ttft) >= least


def test_the_gap_is_the_most_over_any_interval() -> None:
    one, other = Heard(), Heard()
    one.service = [(1.0, 10.0), (2.0, 10.0), (5.0, 10.0)]
    other.service = [(3.0, 90.0), (4.0, 30.0), (9.0, 1e9)]
    assert largest_gap(one, other, (1.0, 3.0), 0.0, 6.0) == 40.0
    assert vtc_bound(100, 1000, 0.0, 1.0) == 4000.0


@contextlib.asynccontextmanager
async def four_gateways(settings: Settings, url: str) -> AsyncIterator[tuple[list[Running], dict[str, str]]]:
    async with contextlib.AsyncExitStack() as stack:
        gateways = []
        for number in range(4):
            own = structs.replace(settings, gateway_id=f"g{number}")
            gateways.append(await stack.enter_async_context(running_gateway(own, route(url, "r0"))))
        keys = {}
        for tenant, weight in TENANTS.items():
            text = gateways[0].policy.key(tenant=tenant, tenant_id=tenant, weight=weight)
            keys[tenant] = text
        for gateway in gateways:
            gateway.policy.grants |= gateways[0].policy.grants
        yield gateways, keys


async def shares(settings: Settings, seconds: float) -> tuple[float, float, float]:
    """Service of the heavy tenant over the light one's, their largest gap, and what share of its demand a polite third
    got.
    """
    async with (
        engine() as (url, _),
        four_gateways(settings, url) as (gateways, keys),
        Load([gateway.url for gateway in gateways], "m") as load,
    ):
        for tenant in ("light", "heavy"):
            load.flood(Ask(tenant, keys[tenant], 40, 20), 3)
        load.pace(Ask("polite", keys["polite"], 10, 5), 0.25)
        await asyncio.sleep(2.0)
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        end = time.monotonic()
        light, heavy, polite = (load.heard[tenant] for tenant in TENANTS)
        ratio = heavy.charged(begin, end) / light.charged(begin, end)
        gap = largest_gap(light, heavy, (1.0, 3.0), begin, end)
        return ratio, gap, polite.counted(begin, end) / (seconds / 0.25 * 15)


async def test_f24_flooding_tenants_get_service_by_weight_through_four_gateways(
    offline_settings: Settings, valkey: str, redis: Redis
) -> None:
    own = structs.replace(
        offline_settings, redis_url=Secret(valkey), lease_deadline_ms=10_000, assumed_context=200, assumed_slots=4
    )
    ratio, gap, polite = await shares(own, 6.0)
    assert ratio == pytest.approx(3.0, rel=0.15)
    assert gap <= vtc_bound(40, 4 * 20, 2 * 4 / SPEED.step_s * 0.05, 1.0)
    assert polite > 0.9, "what is below its floor is served in full"


async def test_by_arrival_the_same_load_gets_service_by_what_it_asks(
    offline_settings: Settings, valkey: str, redis: Redis
) -> None:
    own = structs.replace(
        offline_settings, redis_url=Secret(valkey), lease_deadline_ms=10_000, assumed_context=200, assumed_slots=10_000
    )
    ratio, _, _ = await shares(own, 3.0)
    assert ratio < 1.5, "the control: the engine holds all that comes"
