"""The admin API of fleet and telemetry, as operator, viewer, tenant and stranger."""

from __future__ import annotations

from controlplane.db import transaction
from controlplane.fleet import service
from controlplane.settings import Settings
from tests.controlplane.clients import deployment
from tests.controlplane.telemetry.reports import MODEL, POOL, report

DOMAINS = ["tenants", "accounts", "fleet", "telemetry", "ledger"]
READING = ["/api/v1/pools", "/api/v1/replicas", "/api/v1/overview"]


async def test_pools_replicas_and_overview_are_for_operators_and_viewers(settings: Settings) -> None:
    async with deployment(settings, DOMAINS) as deployed:
        async with transaction(deployed.app.state.resources.engine) as session:
            await service.ensure_pool(session, POOL, MODEL)
            await service.take_in(session, [report("r1")], 0.0)
        for path in READING:
            for headers, status in (
                ({}, 401),
                (deployed.tenant_member, 401),
                (deployed.viewer, 200),
                (deployed.operator, 200),
            ):
                assert (await deployed.client.get(path, headers=headers)).status_code == status, path
        pools, replicas, overview = [
            (await deployed.client.get(path, headers=deployed.viewer)).json() for path in READING
        ]
        assert [(pool["name"], pool["model"]) for pool in pools] == [(POOL, MODEL)]
        assert [(one["replica"], one["state"], one["gauges"]) for one in replicas] == [("r1", "ready", None)]
        assert overview["window_s"] == 300 and len(overview["series"]["at"]) == 30
        assert [row["key"] for row in overview["by_replica"]] == ["r1"]


async def test_only_an_operator_may_drain(settings: Settings) -> None:
    async with deployment(settings, DOMAINS) as deployed:
        client, path = deployed.client, "/api/v1/replicas/r1/drain"
        async with transaction(deployed.app.state.resources.engine) as session:
            await service.ensure_pool(session, POOL, MODEL)
            await service.take_in(session, [report("r1")], 0.0)
        for headers, status in (({}, 401), (deployed.tenant_member, 401), (deployed.viewer, 403)):
            assert (await client.post(path, headers=headers)).status_code == status
        answer = await client.post(path, headers=deployed.operator)
        assert (answer.status_code, answer.json()["state"], answer.json()["drain_wanted"]) == (200, "draining", True)
        assert (await client.delete(path, headers=deployed.viewer)).status_code == 403
        answer = await client.delete(path, headers=deployed.operator)
        assert (answer.status_code, answer.json()["drain_wanted"]) == (200, False)
        answer = await client.post("/api/v1/replicas/nobody/drain", headers=deployed.operator)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "replica_not_found")


async def test_bad_overview_windows_get_one_sentence(settings: Settings) -> None:
    async with deployment(settings, DOMAINS) as deployed:
        for window in ("0", "65", "99999", "abc"):
            answer = await deployed.client.get(
                "/api/v1/overview", params={"window_s": window}, headers=deployed.operator
            )
            assert answer.status_code == 400, window
            assert answer.json()["error"]["param"] == "window_s"
