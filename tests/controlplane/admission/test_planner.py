"""Planning shares: from what is stored and who waits to plans in force, each window once, whoever plans it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import psycopg
import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.admission import repository
from controlplane.admission.bands import Band, Lane, line_of
from controlplane.admission.fair_queue import TurnScript
from controlplane.admission.line_state import read_line
from controlplane.admission.planner import WINDOW_S, plan_pools
from controlplane.admission.service import load_plans
from controlplane.admission.tasks import PLAN_SHARES
from controlplane.admission.turn_messages import Arrival, Rules, Turn
from controlplane.db import transaction
from controlplane.fleet import service as fleet
from controlplane.settings import Settings
from controlplane.telemetry.intake import store
from controlplane.telemetry.taskstats import KEY
from controlplane.tenants.service import create_tenant
from controlplane.worker import Worker, create_worker
from dataplane.protocol import GatewayWindow
from tests.controlplane.telemetry.reports import MODEL, POOL, counters, gateway_report, series

NOW = float(int(time.time()) // 10 * 10 + 4)


async def tenants(session: AsyncSession) -> None:
    await fleet.ensure_pool(session, POOL, MODEL)
    await create_tenant(session, slug="acme", name="acme", weight=1.0)
    await create_tenant(session, slug="umbra", name="umbra", weight=3.0)
    await create_tenant(session, slug="polite", name="polite", weight=1.0, floor_tokens_per_s=300.0)


async def served(session: AsyncSession, tokens: dict[str, int], now: float = NOW) -> None:
    """Each tenant's tokens in the last closed span."""
    start = int(now) // 10 * 10 - 10
    window = GatewayWindow(
        start=start,
        series=[series(tenant, counters(prompt=number)) for tenant, number in tokens.items()],
    )
    await store(session, [gateway_report([window])], now)


async def wait_in_line(redis: Redis, *names: str) -> None:
    """These tenants each have a request that waits, and no replica has room."""
    line = line_of(Lane.SHORT, Band.STANDARD)
    arrivals = tuple(Arrival(f"r-{name}", line, name, 1, 10, 1.0) for name in names)
    await TurnScript(redis, MODEL).turn(Turn("g#1", 1, True, Rules(0, 0, 1, 0, 0), arrivals))


async def test_shares_follow_weights_floors_demand_and_capacity(session: AsyncSession, redis: Redis) -> None:
    await tenants(session)
    await served(session, {"acme": 4_000, "umbra": 5_000, "polite": 1_000})
    await wait_in_line(redis, "acme", "umbra")
    [plan] = await plan_pools(session, redis, NOW)
    assert (plan.pool, plan.epoch, plan.capacity) == (POOL, 1, 1_000)
    shares = {share.tenant: share.share for share in plan.shares}
    assert sum(shares.values()) == 1_000
    assert shares["polite"] == 17, "its demand over the last minute is far below its floor"
    assert shares["umbra"] / shares["acme"] == pytest.approx(3, rel=0.01)
    assert await load_plans(session) == [plan]
    state = await read_line(redis, MODEL)
    assert state.tenants == {"acme", "umbra"}
    assert (state.requests, state.slots, state.gateways) == (2, 0, 1)


async def test_a_floor_above_what_weights_bring_raises_the_weight(session: AsyncSession, redis: Redis) -> None:
    await tenants(session)
    await served(session, {"acme": 4_000, "umbra": 5_000, "polite": 1_000})
    await wait_in_line(redis, "acme", "umbra", "polite")
    [plan] = await plan_pools(session, redis, NOW)
    shares = {share.tenant: share.share for share in plan.shares}
    assert shares["polite"] >= 300
    assert plan.weights()["polite"] > 1.0


async def test_without_redis_plans_rest_on_what_was_served(session: AsyncSession) -> None:
    await tenants(session)
    await served(session, {"acme": 600})
    away = Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.5)
    [plan] = await plan_pools(session, away, NOW)
    assert [(share.tenant, share.share) for share in plan.shares] == [("acme", 10)]
    await away.aclose()


async def test_f38_a_window_is_planned_once_and_no_plan_replaces_a_later_epoch(
    session: AsyncSession, redis: Redis
) -> None:
    await tenants(session)
    assert [plan.epoch for plan in await plan_pools(session, redis, NOW)] == [1]
    assert await plan_pools(session, redis, NOW + 1) == []
    assert [plan.epoch for plan in await plan_pools(session, redis, NOW + WINDOW_S)] == [2]
    [latest] = await load_plans(session)
    stale = msgspec.structs.replace(latest, epoch=1)
    put = await repository.put(
        session,
        POOL,
        epoch=stale.epoch,
        window_start=int(NOW) + 10 * WINDOW_S,
        plan=msgspec.msgpack.encode(stale),
        reasons=[],
        planned_at=datetime.now(UTC),
    )
    assert not put
    assert await load_plans(session) == [latest]


async def test_f39_two_planners_at_once_make_one_plan(committed_engine: AsyncEngine, redis: Redis) -> None:
    async with transaction(committed_engine) as session:
        await tenants(session)

    async def plan() -> int:
        async with transaction(committed_engine) as session:
            return len(await plan_pools(session, redis, NOW))

    assert sorted(await asyncio.gather(*(plan() for _ in range(4)))) == [0, 0, 0, 1]
    async with AsyncSession(committed_engine) as session:
        assert [plan.epoch for plan in await load_plans(session)] == [1]


@pytest.fixture
def app(settings: Settings) -> Iterator[Worker]:
    made = create_worker(settings)
    yield made
    made.close_runtime()


def test_f38_the_job_delivered_twice_plans_once(app: Worker, settings: Settings, valkey: str) -> None:
    def epochs() -> list[int]:
        with psycopg.connect(settings.database_url.reveal()) as connection:
            return [row[0] for row in connection.execute("SELECT epoch FROM share_plans")]

    def counted(name: str) -> int:
        with SyncRedis.from_url(valkey) as client:
            return int(client.hget(KEY, name) or 0)

    with psycopg.connect(settings.database_url.reveal()) as connection:
        connection.execute("INSERT INTO pools (name, model) VALUES ('p', 'm')")
    before = int(time.time()) // WINDOW_S
    for _ in range(3):
        app.tasks[PLAN_SHARES].apply(throw=True)
    windows = int(time.time()) // WINDOW_S - before + 1
    assert 1 <= epochs()[0] <= windows
    assert counted(f"{PLAN_SHARES} done") == 3
    assert PLAN_SHARES in app.conf.beat_schedule
