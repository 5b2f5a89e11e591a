"""Gateway, control plane and stores as processes: whatever is killed, the ledger is what engines counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from msgspec import structs
from sqlalchemy import text

from controlplane.db import transaction
from controlplane.ledger import service as ledger
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.local.valkey import EmbeddedValkey
from controlplane.migrate import upgrade
from controlplane.settings import Secret, Settings
from tests.controlplane.gateway.deployment import Accounts
from tests.controlplane.gateway.harness import CHAT, STREAM
from tests.controlplane.gateway.telling import TellingReplica, telling_replica
from tests.controlplane.test_serve import children, serving
from tests.services import free_port, service_folder

CLIENTS = 6
PATIENCE_S = 90.0
ROW = "attempt_id, prompt_tokens, cached_tokens, output_tokens, basis, device_seconds"

Fact = tuple[int, int, int, str, float]


class Traffic:
    """Clients that stream, ask plainly and leave at random points, at whatever address the gateway now has."""

    def __init__(self, key: str, rng: random.Random) -> None:
        self.url = ""
        self._key = key
        self._rng = rng
        self.answered = 0
        self.left = 0

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=20)) as session:
            await asyncio.gather(*(self._client(session) for _ in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while True:
            try:
                await self._ask(session)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.05)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        body = json.dumps(STREAM if self._rng.random() < 0.7 else CHAT)
        leave_after = self._rng.choice([None, self._rng.randint(1, 20)])
        async with session.post(self.url + "/v1/chat/completions", data=body) as response:
            if response.status != 200:
                await asyncio.sleep(0.05)
                return
            seen = 0
            async for line in response.content:
                seen += line.startswith(b"data: ")
                if seen == leave_after:
                    self.left += 1
                    response.close()
                    return
            self.answered += 1


async def facts(accounts: Accounts) -> dict[str, Fact]:
    async with transaction(accounts.engine) as session:
        rows = (await session.execute(text(f"SELECT {ROW} FROM usage_ledger"))).all()
    found = {row[0]: tuple(row[1:]) for row in rows}
    assert len(found) == len(rows), "an attempt is billed once"
    return found  # type: ignore[return-value]


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await met():  # type: ignore[misc]
            await asyncio.sleep(0.1)


async def complete(accounts: Accounts, replica: TellingReplica) -> dict[str, Fact]:
    """The ledger once it has every attempt that the engine worked on, and nothing is held or waits in the stream."""

    async def all_in() -> bool:
        with contextlib.suppress(OSError):
            return replica.active == 0 and set(await facts(accounts)) >= set(replica.produced)
        return False

    await until(all_in)
    return await facts(accounts)


async def check(accounts: Accounts, replica: TellingReplica) -> None:
    """The ledger is the engine's account to the token; what the engine never told is as the answer said."""
    found = await complete(accounts, replica)
    assert set(found) == set(replica.produced)
    for attempt, one in replica.produced.items():
        prompt, cached, output, basis, device = found[attempt]
        if attempt not in replica.silent:
            assert (prompt, cached, output, basis, device) == (
                one.prompt_tokens, one.cached_tokens, one.output_tokens, "engine", one.device_seconds
            ), attempt  # fmt: skip
        elif basis == "engine":
            assert (prompt, cached, output) == (one.prompt_tokens, one.cached_tokens, one.output_tokens)
        else:
            assert basis == "counted" and output <= one.output_tokens, "never more than the engine produced"
    async with transaction(accounts.engine) as session:
        assert await session.scalar(text("SELECT count(*) FROM usage_refused")) == 0
        today = datetime.now(UTC).date()
        assert await ledger.check_sums(session, today - timedelta(days=1), today + timedelta(days=1)) == []


class Stack:
    """Processes of one deployment; the gateway can be killed and started again."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._stack = stack
        _, port = stack.enter_context(serving("control", settings))
        self.settings = structs.replace(settings, control_url=f"http://127.0.0.1:{port}")
        self.gateway: subprocess.Popen[bytes]

    def start_gateway(self) -> str:
        self.gateway, port = self._stack.enter_context(
            serving("gateway", self.settings, TIDEGATE_CONTROL_URL=self.settings.control_url)
        )
        return f"http://127.0.0.1:{port}"

    def kill_gateway(self) -> None:
        for pid in [*children(self.gateway.pid), self.gateway.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.gateway.wait(10)


@asynccontextmanager
async def under_traffic(
    settings: Settings, rng: random.Random
) -> AsyncIterator[tuple[Stack, Accounts, TellingReplica, Traffic]]:
    """Everything runs and clients ask; at the end they stop."""
    with ExitStack() as processes:
        stack = await asyncio.to_thread(Stack, settings, processes)
        accounts = Accounts(stack.settings)
        await accounts.tenant("acme")
        await accounts.pool("pool-m", "m")
        key = await accounts.key("acme")
        async with telling_replica(rng) as replica:
            replica.control, replica.token = stack.settings.control_url, settings.internal_token.reveal()
            telling = asyncio.create_task(replica.tell())
            traffic = Traffic(key, rng)
            traffic.url = await asyncio.to_thread(stack.start_gateway)
            clients = asyncio.create_task(traffic.run())
            try:
                await seconds_of(replica, 60)
                yield stack, accounts, replica, traffic
            finally:
                for task in (clients, telling):
                    task.cancel()
                await asyncio.gather(clients, telling, return_exceptions=True)
                await accounts.close()


async def seconds_of(replica: TellingReplica, attempts: int) -> None:
    """Let traffic go on until so many more attempts have ended."""
    goal = len(replica.produced) + attempts
    async with asyncio.timeout(PATIENCE_S):
        while len(replica.produced) < goal:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def quiet(traffic: Traffic, replica: TellingReplica) -> AsyncIterator[None]:
    """No new requests from here on."""
    traffic.url = "http://127.0.0.1:1"
    async with asyncio.timeout(30):
        while replica.active:
            await asyncio.sleep(0.05)
    yield


async def test_f7_f11_a_gateway_killed_under_traffic_loses_no_token(settings: Settings, rng: random.Random) -> None:
    async with under_traffic(settings, rng) as (stack, accounts, replica, traffic):
        for _ in range(2):
            await asyncio.to_thread(stack.kill_gateway)
            traffic.url = await asyncio.to_thread(stack.start_gateway)
            await seconds_of(replica, 40)
        assert traffic.left > 5 and traffic.answered > 20
        async with quiet(traffic, replica):
            await check(accounts, replica)
        spool = stack.settings.home / "gateway" / stack.settings.gateway_id / "usage"

        async def shipped() -> bool:
            return sum(path.stat().st_size for path in spool.glob("usage-*.spool")) < 300_000

        await until(shipped)


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedValkey]:
    with service_folder("valkey") as folder:
        server = EmbeddedValkey(folder / "data", free_port())
        server.start()
        try:
            yield server
        finally:
            server.stop()


async def test_f14_redis_started_again_empty_under_traffic_loses_nothing_and_bills_nothing_twice(
    settings: Settings, own_valkey: EmbeddedValkey, rng: random.Random
) -> None:
    own = structs.replace(settings, redis_url=Secret(own_valkey.url))
    async with under_traffic(own, rng) as (_, accounts, replica, traffic):
        replica.hides = True  # from here on only gateways can tell, through Redis
        await seconds_of(replica, 20)
        assert own_valkey.child is not None
        os.kill(own_valkey.child.pid, signal.SIGKILL)
        own_valkey.stop()
        await seconds_of(replica, 20)
        shutil.rmtree(own_valkey.directory)
        own_valkey.start()
        await seconds_of(replica, 20)
        replica.hides = False
        await seconds_of(replica, 10)
        async with quiet(traffic, replica):
            assert len(replica.silent) >= 50
            await check(accounts, replica)


async def test_f15_postgres_stopped_under_traffic_the_ledger_is_complete_afterwards(
    settings: Settings, rng: random.Random
) -> None:
    with service_folder("pg") as folder:
        postgres = EmbeddedPostgres(folder / "data", free_port(), options={"fsync": "off"})
        postgres.start()
        try:
            await asyncio.to_thread(upgrade, Secret(postgres.url))
            own = structs.replace(settings, database_url=Secret(postgres.url))
            async with under_traffic(own, rng) as (_, accounts, replica, traffic):
                await accounts.engine.dispose()
                await asyncio.to_thread(postgres.stop)
                before, answered = len(replica.produced), traffic.answered
                await seconds_of(replica, 60)
                replica.hides = True
                await seconds_of(replica, 20)
                replica.hides = False
                assert traffic.answered > answered, "inference goes on"
                postgres.start()
                await seconds_of(replica, 20)
                async with quiet(traffic, replica):
                    assert len(replica.produced) >= before + 100
                    await check(accounts, replica)
        finally:
            postgres.stop()
