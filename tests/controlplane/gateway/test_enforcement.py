"""What operators set is what gateways enforce: the whole application on real Postgres and Valkey, whatever is away."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from msgspec import structs

from controlplane.db import transaction
from controlplane.ledger import service as ledger
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.migrate import upgrade
from controlplane.quotas import price_service
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import Away, QuotaKind
from controlplane.quotas.views import GrantSpec, PriceSpec, QuotaPatch, QuotaSpec, QuotaView
from controlplane.settings import Secret, Settings
from controlplane.tenants.service import rotate_key
from tests.controlplane.admission.test_leases_away import Stoppable, a_store
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.deployment import Accounts, Deployed, deployed_gateway, until
from tests.controlplane.gateway.harness import CHAT
from tests.controlplane.gateway.replicas import FakeReplica, fake_replica
from tests.controlplane.telemetry.reports import usage
from tests.controlplane.test_serve import serving
from tests.services import free_port, service_folder

RPM, DAY, MONEY = QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.TOKENS_PER_DAY, QuotaKind.MONEY_PER_DAY
REFUSED = (429, "requests_per_minute_exceeded")
SERVED = (200, "")
DEADLINE_MS = 5_000
"""Wide: what is tested is not how fast this machine is."""


class Operator(Accounts):
    """An operator who also sets quotas."""

    async def quota(self, slug: str, kind: QuotaKind, hard: int, **more: object) -> QuotaView:
        spec = QuotaSpec(kind=kind, hard=hard, **more)  # type: ignore[arg-type]
        async with transaction(self.engine) as session:
            return await quotas.create_quota(session, slug, spec)

    async def limited_key(self, slug: str, kind: QuotaKind, hard: int, **more: object) -> str:
        """A new tenant's key, and its limit."""
        await self.tenant(slug)
        await self.quota(slug, kind, hard, **more)
        return await self.key(slug)


@pytest.fixture
def wide(settings: Settings) -> Settings:
    return structs.replace(settings, lease_deadline_ms=DEADLINE_MS)


@pytest.fixture
async def operator(wide: Settings) -> AsyncIterator[Operator]:
    operator = Operator(wide)
    await operator.pool("pool-m", "m")
    yield operator
    await operator.close()


@pytest.fixture
async def replica(operator: Operator) -> AsyncIterator[FakeReplica]:
    async with fake_replica() as running:
        await operator.replica("r0", "pool-m", running.url)
        yield running


@pytest.fixture
async def gateway(wide: Settings, replica: FakeReplica) -> AsyncIterator[Deployed]:
    async with deployed_gateway(wide) as running:
        yield running


async def soon(gateway: Deployed, key: str, expected: tuple[int, str]) -> None:
    """The next answers become the expected one within two seconds."""
    async with asyncio.timeout(2.0):
        while await gateway.status(key) != expected:
            await asyncio.sleep(0.02)


async def test_f5_f17_a_quota_set_changed_raised_and_taken_away_is_enforced_at_once(
    gateway: Deployed, operator: Operator, replica: FakeReplica
) -> None:
    await operator.tenant("acme")
    key = await operator.key("acme")
    assert await gateway.status(key) == SERVED
    quota = await operator.quota("acme", RPM, 0)
    await soon(gateway, key, REFUSED)
    seen = len(replica.seen)
    assert await gateway.status(key) == REFUSED
    assert len(replica.seen) == seen
    async with transaction(operator.engine) as session:
        await quotas.change_quota(session, quota.id, QuotaPatch(hard=1))
    await soon(gateway, key, SERVED)
    assert await gateway.status(key) == REFUSED
    async with transaction(operator.engine) as session:
        spec = GrantSpec(amount=2, expires_at=datetime.now(UTC) + timedelta(hours=1), reason="launch")
        raised = await quotas.grant(session, quota.id, spec, by="ada")
    await soon(gateway, key, SERVED)
    async with transaction(operator.engine) as session:
        await quotas.end_grant(session, quota.id, raised.id)
    await soon(gateway, key, REFUSED)
    async with transaction(operator.engine) as session:
        await quotas.delete_quota(session, quota.id)
    await soon(gateway, key, SERVED)
    assert 'kind="requests_per_minute"' in await gateway.metrics()


async def test_f10_a_keys_limit_goes_on_through_its_rotation(gateway: Deployed, operator: Operator) -> None:
    await operator.tenant("acme")
    key, other = await operator.key("acme"), await operator.key("acme")
    await operator.quota("acme", RPM, 1, key=key.split("_")[1])
    assert await gateway.status(key) == SERVED
    async with transaction(operator.engine) as session:
        rotated = (await rotate_key(session, key.split("_")[1])).plain.reveal()
    assert await gateway.status(rotated) == REFUSED
    assert await gateway.status(key) == REFUSED
    assert await gateway.status(other) == SERVED


async def test_what_the_ledger_has_of_a_day_counts_after_redis_forgot_it(gateway: Deployed, operator: Operator) -> None:
    key = await operator.limited_key("acme", DAY, 10_000)
    now = time.time()
    async with transaction(operator.engine) as session:
        used = usage(
            "attempt-1",
            tenant="acme",
            key_id=key.split("_")[1],
            model="m",
            started_at=now - 1,
            finished_at=now,
            prompt_tokens=9_000,
            cached_tokens=0,
            output_tokens=990,
        )
        await ledger.record(session, [used])
    assert await gateway.status(key, max_tokens=5) == (429, "tokens_per_day_exceeded")
    async with transaction(operator.engine) as session:
        quota = (await quotas.list_quotas(session, "acme")).items[0]
        await quotas.change_quota(session, quota.id, QuotaPatch(hard=11_000))
    await soon(gateway, key, (429, "tokens_per_day_exceeded"))  # without a limit of its own it could fill the context
    async with asyncio.timeout(2):
        while await gateway.status(key, max_tokens=5) != SERVED:
            await asyncio.sleep(0.02)


async def test_money_of_the_ledger_counts_at_its_price(gateway: Deployed, operator: Operator) -> None:
    key = await operator.limited_key("acme", MONEY, 30_000)
    async with transaction(operator.engine) as session:
        spec = PriceSpec(uncached_input=2_000_000, cached_input=0, output=8_000_000, device_second=0)
        await price_service.set_price(session, spec, by="ada")
    now = time.time()
    async with transaction(operator.engine) as session:
        used = usage(
            "attempt-1",
            tenant="acme",
            key_id=key.split("_")[1],
            model="m",
            started_at=now,
            finished_at=now + 0.5,
            prompt_tokens=10_000,
            cached_tokens=0,
            output_tokens=1_000,
        )
        await ledger.record(session, [used])
    assert await gateway.status(key, max_tokens=500) == (429, "money_per_day_exceeded")
    assert await gateway.status(key, max_tokens=50) == SERVED


async def test_f15_without_postgres_known_tenants_go_on_with_their_quotas_also_after_a_restart(
    wide: Settings,
) -> None:
    with service_folder("f15") as folder:
        server = EmbeddedPostgres(folder / "data", free_port(), options={"fsync": "off"})
        server.start()
        try:
            upgrade(Secret(server.url))
            own = structs.replace(wide, database_url=Secret(server.url))
            operator = Operator(own)
            await operator.pool("pool-m", "m")
            known = await operator.limited_key("known", RPM, 3)
            ahead = await operator.limited_key("ahead", RPM, 2)
            async with fake_replica() as replica:
                await operator.replica("r0", "pool-m", replica.url)
                async with deployed_gateway(own) as gateway:
                    directory = gateway.gateway.meter.quotas
                    assert await gateway.status(known) == SERVED
                    await until(lambda: len(directory.known()) == 2 and len(gateway.gateway.keys.known()) == 2)
                    await asyncio.to_thread(server.stop)
                    await until(lambda: not gateway.gateway.fleet.listening)
                    await asyncio.sleep(1.5)
                    assert [await gateway.status(known) for _ in range(3)] == [SERVED, SERVED, REFUSED]
                    assert await gateway.status(ahead) == SERVED  # never used before: read ahead
                async with deployed_gateway(own) as again:
                    assert await again.status(known) == REFUSED
                    assert [await again.status(ahead) for _ in range(2)] == [SERVED, REFUSED]
                    server.start()
                    await until(lambda: again.gateway.fleet.listening)
                    await operator.quota("known", RPM, 100, model="m")
                    fresh = await operator.limited_key("fresh", RPM, 1)
                    assert [await again.status(fresh) for _ in range(2)] == [SERVED, REFUSED]
            await operator.close()
        finally:
            server.stop()


async def test_f14_redis_killed_under_traffic_leaves_each_limit_its_declared_mode(wide: Settings) -> None:
    with a_store() as store:
        own = structs.replace(wide, redis_url=Secret(store.url), lease_deadline_ms=500)
        operator = Operator(own)
        await operator.pool("pool-m", "m")
        large = 1_000_000
        keys = {
            "closed": await operator.limited_key("closed", RPM, large),
            "local": await operator.limited_key("local", RPM, large, away=Away.LOCAL, local=5),
            "open": await operator.limited_key("open", RPM, large, away=Away.OPEN),
        }
        await operator.tenant("free")
        keys["free"] = await operator.key("free")
        try:
            async with fake_replica() as replica:
                await operator.replica("r0", "pool-m", replica.url)
                async with deployed_gateway(own) as gateway:
                    await _outage(gateway, store, keys)
        finally:
            await operator.close()


async def _outage(gateway: Deployed, store: Stoppable, keys: dict[str, str]) -> None:
    leases = gateway.gateway.meter.leases
    answers: dict[str, Counter[tuple[int, str]]] = {name: Counter() for name in keys}
    away = False
    stop = asyncio.Event()

    async def load(name: str) -> None:
        while not stop.is_set():
            counted = away
            answer = await gateway.status(keys[name])
            if counted and away:
                answers[name][answer] += 1
            await asyncio.sleep(0.01)

    for name, key in keys.items():
        assert await gateway.status(key) == SERVED, name
    loading = [asyncio.create_task(load(name)) for name in keys]
    await asyncio.to_thread(store.kill)
    await until(lambda: leases.is_away)
    away = True
    await asyncio.sleep(2.0)
    assert "tidegate_gateway_lease_store_away 1.0" in await gateway.metrics()
    away = False
    await asyncio.to_thread(store.server.start)
    await until(lambda: not leases.is_away)
    async with asyncio.timeout(10):
        while await gateway.status(keys["closed"]) != SERVED:
            await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*loading)
    refused = (503, "quota_store_unavailable")
    assert set(answers["free"]) == {SERVED}
    assert set(answers["open"]) == {SERVED}
    assert set(answers["closed"]) == {refused}
    assert set(answers["local"]) <= {SERVED, refused}
    assert answers["local"][SERVED] <= 5
    assert answers["local"][refused] > 0
    await until(lambda: not leases.in_flight and not leases.deferred)


@pytest.mark.parametrize("gateways", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
async def test_f1_f13_gateway_processes_hold_one_limit(wide: Settings, operator: Operator, gateways: int) -> None:
    """Whole processes: no minute above the limit and none of it lost, nor ever more at once than may be."""
    minute = await operator.limited_key("minute", RPM, 150)
    slots = await operator.limited_key("slots", QuotaKind.CONCURRENT_REQUESTS, 5)
    answer = json.dumps(replicas.COMPLETION)

    async def slow(request: aiohttp.web.Request, _: bytes) -> aiohttp.web.StreamResponse:
        await asyncio.sleep(0.03)
        return aiohttp.web.Response(text=answer, content_type="application/json")

    async with fake_replica(slow) as replica, aiohttp.ClientSession() as client:
        await operator.replica("r0", "pool-m", replica.url)
        with ExitStack() as stack:

            def start(number: int) -> int:
                own = structs.replace(wide, home=wide.home / str(number))
                return stack.enter_context(
                    serving(
                        "gateway",
                        own,
                        TIDEGATE_GATEWAY_ID=f"gateway-{number}",
                        TIDEGATE_LEASE_DEADLINE_MS=str(DEADLINE_MS),
                    )
                )[1]

            ports = [await asyncio.to_thread(start, number) for number in range(gateways)]

            served: list[tuple[float, float]] = []

            async def ask(key: str, port: int) -> int:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                headers = {"authorization": f"Bearer {key}"}
                begun = time.monotonic()
                async with client.post(url, data=json.dumps(CHAT), headers=headers) as response:
                    await response.read()
                    if response.status == 200:
                        served.append((begun, time.monotonic()))
                    return response.status

            async def flood(key: str, requests: int, together: int) -> Counter[int]:
                numbers = iter(range(requests))
                turns = itertools.cycle(ports)

                async def one() -> list[int]:
                    return [await ask(key, next(turns)) for _ in numbers]

                found = await asyncio.gather(*(one() for _ in range(together)))
                return Counter(itertools.chain.from_iterable(found))

            counted = await flood(minute, 400, 32)
            assert set(counted) == {200, 429}
            assert len(replica.seen) == counted[200] >= 150
            for _, end in served:
                assert sum(end - 60 < before and after <= end for before, after in served) <= 150
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, replica.active)
                    await asyncio.sleep(0.001)

            watching = asyncio.create_task(watch())
            counted = await flood(slots, 400, 32)
            watching.cancel()
            assert set(counted) == {200, 429}
            assert 1 < most <= 5
