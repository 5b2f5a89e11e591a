"""The Dispatch panel of the Replicas page, with the real services behind it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest_asyncio

from controlplane.admission.bands import Band, Lane, line_of
from controlplane.admission.fair_queue import TurnScript
from controlplane.admission.planner import plan_pools
from controlplane.admission.turn_messages import Arrival, Rules, Turn
from controlplane.db import transaction
from controlplane.fleet import service as fleet
from controlplane.settings import Settings
from controlplane.tenants.schemas import TenantPatch
from controlplane.tenants.service import change_tenant
from tests.controlplane.clients import Deployment, deployment, log_in


@pytest_asyncio.fixture
async def operator(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings) as running:
        await log_in(running, running.operator_email)
        yield running


async def test_the_panel_shows_who_waits_and_what_was_planned(operator: Deployment) -> None:
    resources = operator.app.state.resources
    async with transaction(resources.engine) as session:
        await fleet.ensure_pool(session, "pool-m", "m")
        await change_tenant(session, "acme", TenantPatch(weight=3.0))
    assert 'hx-get="/dispatch" hx-trigger="load"' in (await operator.client.get("/replicas")).text
    page = await operator.client.get("/dispatch", headers={"hx-request": "true"})
    assert "no shares are planned yet" in page.text
    assert "Nobody asks for this pool" in page.text
    arrival = Arrival("r", line_of(Lane.SHORT, Band.LOW), "acme", 1, 10, 1.0)
    await TurnScript(resources.redis, "m").turn(Turn("g#1", 1, True, Rules(0, 0, 1, 0, 0), (arrival,)))
    async with transaction(resources.engine) as session:
        assert len(await plan_pools(session, resources.redis, time.time())) == 1
    panel = await operator.client.get("/dispatch", headers={"hx-request": "true"})
    assert panel.status_code == 200
    assert "<html" not in panel.text
    assert "planned as epoch 1" in panel.text
    assert '<dt>Tenants waiting, low</dt><dd class="figure">1</dd>' in panel.text
    assert '<a href="/tenants/acme">acme</a>' in panel.text
    assert '<td class="n" data-label="Weight">3</td>' in panel.text
    whole = await operator.client.get("/dispatch")
    assert whole.status_code == 200
    assert "<h1>Dispatch</h1>" in whole.text
    assert "planned as epoch 1" in whole.text


async def test_strangers_see_nothing_of_it(settings: Settings) -> None:
    async with deployment(settings) as running:
        answer = await running.client.get("/dispatch", headers={"hx-request": "true"})
        assert answer.status_code in {303, 401}
        assert "dispatch-" not in answer.text


async def test_a_pools_size_is_set_through_the_api_and_reaches_the_view(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        await fleet.ensure_pool(session, "pool-m", "m")
    headers = operator.operator
    answer = await operator.client.patch("/api/v1/pools/pool-m", json={"replica_slots": 7}, headers=headers)
    assert (answer.status_code, answer.json()["replica_slots"], answer.json()["replica_tokens"]) == (200, 7, 0)
    answer = await operator.client.patch("/api/v1/pools/none", json={"replica_slots": 7}, headers=headers)
    assert answer.status_code == 404
    answer = await operator.client.patch("/api/v1/pools/pool-m", json={"replica_slots": -1}, headers=headers)
    assert answer.status_code == 400
    async with transaction(operator.app.state.resources.engine) as session:
        assert [pool.replica_slots for pool in (await fleet.load_fleet(session)).pools] == [7]
