"""/metrics: authenticated, honest when the database is away, and monotone over workers."""

from __future__ import annotations

import httpx
import pytest
from redis.asyncio import Redis

from controlplane.app import Role, create_app
from controlplane.db import transaction
from controlplane.errors import AuthenticationError
from controlplane.fleet import service as fleet
from controlplane.settings import Secret, Settings
from controlplane.telemetry.labels import KnownLabels
from controlplane.telemetry.prometheus import component, require_metrics_token
from controlplane.telemetry.scrape import LabelLearner
from controlplane.telemetry.taskstats import TaskCount, TaskStats
from dataplane.protocol import encode
from tests.conftest import make_settings
from tests.controlplane.clients import deployment
from tests.controlplane.telemetry.reports import MODEL, POOL, report

DOMAINS = ["tenants", "accounts", "fleet", "telemetry", "ledger"]


@pytest.fixture
def closed(tmp_path: object) -> Settings:
    return make_settings(tmp_path, database_url="postgresql://x", redis_url="redis://x", metrics_token=Secret("scrape"))  # type: ignore[arg-type]


def test_f32_metrics_ask_for_the_metrics_token(closed: Settings) -> None:
    require_metrics_token(closed, "Bearer scrape")
    for wrong in ("", "scrape", "Bearer", "Bearer nonsense", "Basic scrape", "Bearer internal-token-of-the-tests"):
        with pytest.raises(AuthenticationError):
            require_metrics_token(closed, wrong)


def test_without_a_metrics_token_the_internal_one_opens_metrics(tmp_path: object) -> None:
    settings = make_settings(tmp_path, database_url="postgresql://x", redis_url="redis://x")  # type: ignore[arg-type]
    require_metrics_token(settings, f"Bearer {settings.internal_token.reveal()}")
    with pytest.raises(AuthenticationError):
        require_metrics_token(settings, "Bearer ")
    opened = make_settings(tmp_path, database_url="x", redis_url="x", metrics_open=True)  # type: ignore[arg-type]
    require_metrics_token(opened, "")


async def test_a_scrape_shows_intake_replicas_and_jobs(settings: Settings, redis: Redis) -> None:
    token = {"authorization": f"Bearer {settings.internal_token.reveal()}"}
    await TaskStats(redis).count("telemetry.roll_up", "done", 0.5)
    async with deployment(settings, DOMAINS) as deployed:
        deployed.app.register(component(deployed.app.state.resources, Role.CONTROL).routes[0])
        async with transaction(deployed.app.state.resources.engine) as session:
            await fleet.ensure_pool(session, POOL, MODEL)
        body = encode(report())
        assert (await deployed.client.post("/internal/v1/reports", content=body, headers=token)).status_code == 200
        for headers in ({}, deployed.operator, deployed.tenant_member):
            assert (await deployed.client.get("/metrics", headers=headers)).status_code == 401
        answer = await deployed.client.get("/metrics", headers=token)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.text.splitlines()
        for line in (
            'tidegate_reports_total{source="engine"} 1.0',
            'tidegate_replicas{state="ready"} 1.0',
            'tidegate_replicas{state="lost"} 0.0',
            'tidegate_rollup_lag_seconds{job="rollup-60"} 0.0',
            'tidegate_task_runs_total{outcome="done",task="telemetry.roll_up"} 1.0',
            "tidegate_usage_records_total 0.0",
        ):
            assert line in lines
        assert "acme" not in answer.text


@pytest.mark.parametrize("role", list(Role))
async def test_f15_metrics_are_served_while_the_stores_are_away(offline_settings: Settings, role: Role) -> None:
    domains = DOMAINS if role is Role.CONTROL else []
    app = create_app(role, offline_settings, domains=domains)
    app.register(component(app.state.resources, role).routes[0])
    token = {"authorization": f"Bearer {offline_settings.internal_token.reveal()}"}
    transport = httpx.ASGITransport(app)
    async with app.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://gateway.example") as client:
        assert (await client.get("/metrics", headers=token)).status_code == 200
        assert (await client.get("/metrics")).status_code == 401


async def test_f28_job_counts_only_grow_over_workers_and_restarts(redis: Redis) -> None:
    for worker in (TaskStats(redis), TaskStats(redis)):
        await worker.count("telemetry.roll_up", "done", 0.25)
        await worker.count("telemetry.roll_up", "failed", 0.5)
    assert await TaskStats(redis).read() == [TaskCount("telemetry.roll_up", done=2, failed=2, seconds=1.5)]


async def test_a_job_never_fails_because_it_could_not_be_counted() -> None:
    nowhere = Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.2)
    await TaskStats(nowhere).count("telemetry.roll_up", "done", 0.1)
    await nowhere.aclose()


def test_f32_only_registered_names_become_label_values_and_only_so_many() -> None:
    asked: list[None] = []
    labels = KnownLabels(lambda: asked.append(None))
    labels.learn(tenants=(f"t{n}" for n in range(5_000)), models=["m"])
    assert (labels.tenant("t0"), labels.model("m")) == ("t0", "m")
    assert asked == []
    assert {labels.tenant(f"t{n}") for n in range(4_000, 5_000)} == {"other"}
    assert labels.model("'; DROP TABLE--") == "other"
    assert asked, "an unknown name is looked up again"


async def test_label_values_are_learnt_from_all_pages_of_tenants(settings: Settings) -> None:
    async with deployment(settings, DOMAINS) as deployed:
        resources = deployed.app.state.resources
        labels = KnownLabels()
        async with transaction(resources.engine) as session:
            await fleet.ensure_pool(session, POOL, MODEL)
        await LabelLearner(resources, labels).learn()
        assert (labels.tenant("acme"), labels.model(MODEL), labels.tenant("junk")) == ("acme", MODEL, "other")
