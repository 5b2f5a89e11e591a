"""F17: two gateways and a replica report to a control plane; one gateway is cut off from Postgres, its skew
shows by name and age, and a wrong edit is taken back everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import structs

from controlplane.app import Role, create_app
from controlplane.db import transaction
from controlplane.http.server import HttpServer
from controlplane.policy import skew
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import QuotaPatch
from controlplane.settings import Secret, Settings
from dataplane.replica import Replica
from dataplane.reporter import HttpTransport, Reporter
from tests.controlplane.gateway.deployment import Deployed, deployed_gateway, reachable
from tests.controlplane.gateway.replicas import fake_replica
from tests.controlplane.gateway.test_enforcement import DEADLINE_MS, REFUSED, SERVED, Operator
from tests.dataplane.replica.harness import make_config, scripted, smollm2_tokenizer
from tests.factories.cut import Cut, cuttable
from tests.factories.rows import make_admin_token
from tests.services import loopback_socket

RPM = QuotaKind.REQUESTS_PER_MINUTE


@asynccontextmanager
async def control_plane(settings: Settings) -> AsyncIterator[str]:
    """The control plane on a port, in this loop; its URL."""
    app = create_app(Role.CONTROL, settings)
    listening = loopback_socket()
    port = listening.getsockname()[1]
    server = HttpServer(app, listening)
    serving = asyncio.create_task(server.serve())
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as client:
        await reachable(client, url)
    try:
        yield url
    finally:
        server.stop()
        async with asyncio.timeout(20):
            await serving


@dataclass
class World:
    """One deployment of all; `database` is cut between Postgres and the gateway `lonely` alone."""

    url: str
    operator: Operator
    token: str
    near: Deployed
    lonely: Deployed
    database: Cut
    replica: Reporter
    client: aiohttp.ClientSession = field(default_factory=aiohttp.ClientSession)

    async def api(self, method: str, path: str) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {self.token}"}
        async with self.client.request(method, f"{self.url}/api/v1{path}", headers=headers) as answer:
            return answer.status, await answer.json()

    async def states(self) -> dict[str, str]:
        await self.replica.report()
        _, found = await self.api("GET", "/policy")
        return {holder["name"]: holder["state"] for holder in found["holders"]}

    async def becomes(self, expected: dict[str, str]) -> None:
        """Wait until every holder is in its state; the replica hears of an epoch with one report and tells it with
        the next."""
        seen: dict[str, str] = {}
        try:
            async with asyncio.timeout(60):
                while (seen := await self.states()) != expected:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"the states stay {seen}, not {expected}") from None


@pytest.fixture
async def world(settings: Settings, tmp_path: Path) -> AsyncIterator[World]:
    settings = structs.replace(settings, lease_deadline_ms=DEADLINE_MS, report_interval_s=0.1)
    operator = Operator(settings)
    await operator.pool("pool-m", "m")
    async with transaction(operator.engine) as session:
        token = (await make_admin_token(session)).reveal()
    transport = None
    async with (
        fake_replica() as serving,
        control_plane(settings) as url,
        cuttable(settings.database_url.reveal()) as (database, behind),
    ):
        await operator.replica("r0", "pool-m", serving.url)
        near = structs.replace(settings, control_url=url, gateway_id="near")
        lonely = structs.replace(near, gateway_id="lonely", database_url=Secret(behind))
        config = make_config(tmp_path / "replica", scripted(), replica="r1", pool="pool-m", served_model="m")
        replica = Replica(config, smollm2_tokenizer())
        transport = HttpTransport(url, settings.internal_token.reveal())
        async with deployed_gateway(near) as one, deployed_gateway(lonely) as two:
            world = World(url, operator, token, one, two, database, Reporter(replica, transport))
            yield world
            await world.client.close()
        await transport.close()
        await replica.journal.close()
    await operator.close()


async def test_f17_an_edit_that_misses_a_gateway_shows_and_is_taken_back_with_one_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skew, "SETTLES_S", 1.0)
    monkeypatch.setattr("controlplane.gateway.policy.ANSWER_S", 0.5)
    key = await world.operator.limited_key("acme", RPM, 100)
    for gateway in (world.near, world.lonely):
        assert await gateway.status(key) == SERVED
    settled = {"near": "current", "lonely": "current", "r0": "silent", "r1": "current"}  # r0 never spoke itself
    async with transaction(world.operator.engine) as session:
        quota = (await quotas.list_quotas(session, "acme")).items[0]
    await world.becomes(settled)

    world.database.cut()
    async with transaction(world.operator.engine) as session:
        await quotas.change_quota(session, quota.id, QuotaPatch(hard=0))
    await world.becomes({**settled, "lonely": "behind"})
    _, whole = await world.api("GET", "/policy")
    late = next(one for one in whole["holders"] if one["name"] == "lonely")
    assert late["behind"] >= 1  # a replica's state may have changed the policy, too
    assert late["for_s"] > 0.3
    assert whole["skewed"] == 2
    assert late["epoch"] == whole["epoch"] - late["behind"]
    assert await world.near.status(key) == REFUSED
    assert await world.lonely.status(key) == SERVED, "what it last knew goes on (F15)"

    world.database.mend()
    await world.becomes(settled)
    assert await world.lonely.status(key) == REFUSED

    _, changes = await world.api("GET", "/policy/changes?kind=quotas&limit=1")
    edit = changes["items"][0]
    assert (edit["before"]["hard"], edit["after"]["hard"]) == (100, 0)
    status, restored = await world.api("POST", f"/policy/changes/{edit['id']}/rollback")
    assert status == 200, restored
    assert (restored["restores"], restored["after"]["hard"]) == (edit["id"], 100)
    assert restored["who"].startswith("token")
    await world.becomes(settled)
    for gateway in (world.near, world.lonely):
        assert await gateway.status(key) == SERVED
    status, again = await world.api("POST", f"/policy/changes/{edit['id']}/rollback")
    assert (status, again["error"]["code"]) == (409, "changed_since")
