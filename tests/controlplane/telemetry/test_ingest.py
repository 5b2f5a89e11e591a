"""Group commit over real Postgres, and the internal endpoints."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from controlplane.db import transaction
from controlplane.errors import CapacityError, InvalidRequestError
from controlplane.fleet import service as fleet
from controlplane.fleet.live import LoadPublisher
from controlplane.ledger import service as ledger
from controlplane.settings import Settings
from controlplane.telemetry import ingest as module
from controlplane.telemetry.ingest import Ingestor
from controlplane.telemetry.intake import Stored
from controlplane.telemetry.labels import KnownLabels
from controlplane.telemetry.metrics import IntakeMetrics
from dataplane.protocol import GatewayWindow, ReportAck, encode
from tests.controlplane.clients import deployment
from tests.controlplane.telemetry.reports import (
    MODEL,
    POOL,
    counters,
    engine_window,
    gateway_report,
    report,
    series,
    usage,
)

NOW = 1_700_000_005.0
START = 1_700_000_000
REFUSED = "tidegate_usage_refused_records_total"


class Intake:
    """An ingestor under test with its registry."""

    def __init__(self, engine: AsyncEngine, redis: Redis, **limits: int) -> None:
        self.registry = CollectorRegistry()
        self.labels = KnownLabels()
        metrics = IntakeMetrics(self.registry, self.labels)
        self.publisher = LoadPublisher(redis)
        self.ingestor = Ingestor(engine, self.publisher, metrics, clock=lambda: NOW, **limits)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def pool(committed_engine: AsyncEngine) -> str:
    async with transaction(committed_engine) as session:
        await fleet.ensure_pool(session, POOL, MODEL)
    return POOL


async def count(engine: AsyncEngine, table: str) -> int:
    async with transaction(engine) as session:
        return int(await session.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


async def test_a_burst_of_a_thousand_replicas_is_committed_in_groups_and_all_are_acknowledged(
    committed_engine: AsyncEngine, redis: Redis, pool: str
) -> None:
    commits = 0

    def committed(_: object) -> None:
        nonlocal commits
        commits += 1

    event.listen(committed_engine.sync_engine, "commit", committed)
    intake = Intake(committed_engine, redis)
    running = asyncio.create_task(intake.ingestor.run())
    reports = [report(f"r{n}", windows=[engine_window(START, ttft=[0.1])]) for n in range(1000)]
    acks = await asyncio.gather(*(intake.ingestor.submit(one, 500) for one in reports))
    running.cancel()
    assert [ack.sequence for ack in acks] == [1] * 1000
    assert commits <= 20
    assert await count(committed_engine, "replicas") == 1000
    assert await count(committed_engine, "telemetry_windows") == 1000
    assert intake.metric("tidegate_reports_total", source="engine") == 1000


async def test_an_acknowledgement_comes_only_after_the_commit(
    committed_engine: AsyncEngine, redis: Redis, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = Intake(committed_engine, redis)
    async with committed_engine.connect() as blocker:
        await blocker.execute(text("LOCK TABLE usage_ledger IN EXCLUSIVE MODE"))
        running = asyncio.create_task(intake.ingestor.run())
        waiting = asyncio.create_task(intake.ingestor.submit(report(usage=[usage("one")]), 500))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        await blocker.rollback()
    ack = await waiting
    running.cancel()
    assert ack.usage_ids == ["one"]
    assert await count(committed_engine, "usage_ledger") == 1


async def test_usage_that_is_on_no_bill_is_counted_by_cause(
    committed_engine: AsyncEngine, redis: Redis, pool: str
) -> None:
    intake = Intake(committed_engine, redis)
    running = asyncio.create_task(intake.ingestor.run())
    for cause in ("unfit", "late"):
        assert intake.registry.get_sample_value(REFUSED, {"source": "engine", "cause": cause}) == 0.0
    async with transaction(committed_engine) as session:
        await ledger.record_from_gateways(session, [usage("billed")])
    ack = await intake.ingestor.submit(report(usage=[usage("billed"), usage("good"), usage("")]), 500)
    running.cancel()
    assert sorted(ack.usage_ids) == ["", "billed", "good"]
    assert intake.metric(REFUSED, source="engine", cause="unfit") == 1
    assert intake.metric(REFUSED, source="engine", cause="late") == 1
    assert await count(committed_engine, "usage_refused") == 2


async def test_f22_a_report_the_database_refuses_fails_alone(
    committed_engine: AsyncEngine, redis: Redis, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.store

    async def store(session: object, batch: object, now: float) -> Stored:
        for one in batch:  # type: ignore[attr-defined]
            if getattr(one, "replica", "") == "bad":
                await session.execute(text("SELECT 1/0"))  # type: ignore[attr-defined]
        return await real(session, batch, now)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "store", store)
    intake = Intake(committed_engine, redis)
    submitted = [asyncio.create_task(intake.ingestor.submit(report(name), 1)) for name in ("r1", "bad", "r2")]
    await asyncio.sleep(0)
    running = asyncio.create_task(intake.ingestor.run())
    first, second, third = await asyncio.gather(*submitted, return_exceptions=True)
    running.cancel()
    assert isinstance(first, ReportAck) and isinstance(third, ReportAck)
    assert isinstance(second, Exception)
    assert intake.metric("tidegate_reports_refused_total", source="engine", cause="defect") == 1


async def test_a_full_queue_refuses_and_a_stopping_process_forgets_nobody(
    committed_engine: AsyncEngine, redis: Redis, pool: str
) -> None:
    intake = Intake(committed_engine, redis, max_queued=2)
    waiting = [asyncio.create_task(intake.ingestor.submit(report(f"r{n}"), 1)) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError) as refused:
        await intake.ingestor.submit(report("r9"), 1)
    assert (refused.value.status, refused.value.code) == (503, "ingest_full")
    assert "retry-after" in refused.value.headers
    with pytest.raises(CapacityError):
        await Intake(committed_engine, redis).ingestor.submit(report(), module.MAX_QUEUED_BYTES + 1)
    running = asyncio.create_task(intake.ingestor.run())
    acks = await asyncio.gather(*waiting)
    assert len(acks) == 2
    running.cancel()


async def test_f15_without_postgres_senders_get_503_and_keep_everything(redis: Redis) -> None:
    engine = create_async_engine("postgresql+asyncpg://nobody:nothing@127.0.0.1:1/none")
    intake = Intake(engine, redis)
    running = asyncio.create_task(intake.ingestor.run())
    with pytest.raises(CapacityError) as refused:
        await intake.ingestor.submit(report(), 1)
    running.cancel()
    assert refused.value.code == "database_away"
    assert intake.metric("tidegate_reports_refused_total", source="engine", cause="store_away") == 1
    await engine.dispose()


async def test_a_refused_report_says_why(committed_engine: AsyncEngine, redis: Redis, pool: str) -> None:
    intake = Intake(committed_engine, redis)
    running = asyncio.create_task(intake.ingestor.run())
    with pytest.raises(InvalidRequestError, match="pool 'elsewhere' is not known"):
        await intake.ingestor.submit(report(pool="elsewhere"), 1)
    running.cancel()


async def test_f32_junk_names_add_no_series(committed_engine: AsyncEngine, redis: Redis, pool: str) -> None:
    intake = Intake(committed_engine, redis)
    intake.labels.learn(tenants=["demo"], models=[MODEL])
    running = asyncio.create_task(intake.ingestor.run())
    junk = [usage(tenant=f"junk-{n}", model=f"model-{n}") for n in range(50)]
    await intake.ingestor.submit(report(usage=[usage(), *junk]), 1)
    running.cancel()
    found = {
        (sample.labels["tenant"], sample.labels["model"])
        for family in intake.registry.collect()
        for sample in family.samples
        if sample.name == "tidegate_usage_tokens_total"
    }
    assert found == {("demo", MODEL), ("other", "other")}
    assert intake.metric("tidegate_usage_tokens_total", tenant="demo", model=MODEL, kind="prompt") == 30


async def test_the_endpoints_take_msgpack_with_the_internal_token_only(settings: Settings) -> None:
    token = {"authorization": f"Bearer {settings.internal_token.reveal()}"}
    async with deployment(settings, ["tenants", "accounts", "fleet", "telemetry", "ledger"]) as deployed:
        client = deployed.client
        async with transaction(deployed.app.state.resources.engine) as session:
            await fleet.ensure_pool(session, POOL, MODEL)
        body = encode(report(usage=[usage("attempt-1")]))
        for headers in ({}, deployed.operator, deployed.tenant_member, {"authorization": "Bearer nonsense"}):
            assert (await client.post("/internal/v1/reports", content=body, headers=headers)).status_code == 401
        answer = await client.post("/internal/v1/reports", content=body, headers=token)
        assert answer.status_code == 200
        ack = msgspec.msgpack.decode(answer.content, type=ReportAck)
        assert (ack.sequence, ack.usage_ids) == (1, ["attempt-1"])
        windows = [GatewayWindow(start=0, series=[series("acme", counters())])]
        answer = await client.post(
            "/internal/v1/gateway-reports", content=encode(gateway_report(windows)), headers=token
        )
        ack = msgspec.msgpack.decode(answer.content, type=ReportAck)
        assert ack.sequence == 1 and "older" in ack.refused[0]
        for junk in (b"", b"\xc1", b"\x93\x01", encode({"replica": 5}), b"\x91" * 5000):
            refused = await client.post("/internal/v1/reports", content=junk, headers=token)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "report_unreadable"
        unknown = await client.post("/internal/v1/reports", content=encode(report(pool="nowhere")), headers=token)
        assert unknown.status_code == 400 and "nowhere" in unknown.json()["error"]["message"]
        huge = b"\x00" * (settings.max_body_bytes + 1)
        assert (await client.post("/internal/v1/reports", content=huge, headers=token)).status_code == 413


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/latest/meta-data", "link-local"),
        ("http://0.0.0.0:7310", "unspecified"),
        ("http://[::ffff:169.254.169.254]", "link-local"),
        ("http://93.184.216.34:7310", "no network that is allowed"),
        ("http://u:canary@127.0.0.1", "not http"),
        ("http://no-such-name.invalid", "cannot be resolved"),
        ("http://2130706433:7310", "four decimal numbers"),
    ],
)
async def test_f34_a_replica_at_an_address_nobody_may_connect_to_is_not_registered(
    settings: Settings, url: str, why: str
) -> None:
    token = {"authorization": f"Bearer {settings.internal_token.reveal()}"}
    async with deployment(settings, ["tenants", "accounts", "fleet", "telemetry", "ledger"]) as deployed:
        async with transaction(deployed.app.state.resources.engine) as session:
            await fleet.ensure_pool(session, POOL, MODEL)
        refused = await deployed.client.post("/internal/v1/reports", content=encode(report(url=url)), headers=token)
        assert refused.status_code == 400
        assert why in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "replica_address_refused"
        assert "canary" not in refused.text
        assert (await deployed.client.get("/api/v1/replicas", headers=deployed.operator)).json() == []
        good = await deployed.client.post("/internal/v1/reports", content=encode(report()), headers=token)
        assert good.status_code == 200


async def test_f34_a_claim_far_ahead_does_not_fence_a_replica(settings: Settings) -> None:
    token = {"authorization": f"Bearer {settings.internal_token.reveal()}"}
    async with deployment(settings, ["tenants", "accounts", "fleet", "telemetry", "ledger"]) as deployed:
        async with transaction(deployed.app.state.resources.engine) as session:
            await fleet.ensure_pool(session, POOL, MODEL)

        async def status(**claims: int) -> int:
            body = encode(report(**claims))
            return (await deployed.client.post("/internal/v1/reports", content=body, headers=token)).status_code

        boot = int(time.time() * 1000)
        assert await status(boot_epoch=boot, sequence=1) == 200
        assert await status(boot_epoch=2**62, sequence=1) == 400
        assert await status(boot_epoch=boot, sequence=2**62) == 400
        assert await status(boot_epoch=boot, sequence=2) == 200
        (shown,) = (await deployed.client.get("/api/v1/replicas", headers=deployed.operator)).json()
        assert shown["boot_epoch"] == boot
