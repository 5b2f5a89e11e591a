"""The Overview equals what a person would compute by hand from every single request."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from redis.asyncio import Redis
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.fleet import service as fleet
from controlplane.fleet.live import LiveGauges, gauges_key
from controlplane.telemetry.histogram import BUCKET_WIDTH
from controlplane.telemetry.intake import store
from controlplane.telemetry.overview import overview
from controlplane.telemetry.schemas import Figures, Quantiles
from controlplane.tenants.schemas import PROBE_TENANT
from dataplane.protocol import CoreReady, Counters, GatewayWindow, Gauges, ReplicaState, Window, encode
from tests.controlplane.telemetry.reports import (
    BOOT,
    MODEL,
    POOL,
    counters,
    engine_window,
    gateway_report,
    report,
    series,
)

LAST = 1_700_000_000
NOW = LAST + 4.0
"""The newest span is open for four seconds."""


@dataclass(frozen=True)
class Request:
    """One request as a log would hold it."""

    window: int
    tenant: str
    replica: str
    ttft: float
    tpot: float
    prompt: int
    cached: int
    output: int


def some_requests(rng: random.Random, number: int, windows: range) -> list[Request]:
    found = []
    for _ in range(number):
        prompt = rng.randint(1, 900)
        found.append(
            Request(
                window=LAST + 10 * rng.choice(windows),
                tenant=rng.choice(["acme", "globex"]),
                replica=rng.choice(["r1", "r2"]),
                ttft=rng.lognormvariate(-1.5, 1.0),
                tpot=rng.lognormvariate(-3.5, 0.6),
                prompt=prompt,
                cached=rng.randint(0, prompt),
                output=rng.randint(1, 300),
            )
        )
    return found


async def send(session: AsyncSession, requests: list[Request], *, at: float = NOW, sequence: int = 1) -> None:
    """Report the requests as a gateway would."""
    grouped: dict[tuple[int, str, str], list[Request]] = defaultdict(list)
    for one in requests:
        grouped[one.window, one.tenant, one.replica].append(one)
    windows: dict[int, list[object]] = defaultdict(list)
    for (start, tenant, replica), group in grouped.items():
        made = counters(
            accepted=len(group),
            ttft=[one.ttft for one in group],
            tpot=[one.tpot for one in group],
            prompt=sum(one.prompt for one in group),
            cached=sum(one.cached for one in group),
            output=sum(one.output for one in group),
        )
        windows[start].append(series(tenant, made, replica=replica))
    packed = [GatewayWindow(start=start, series=found) for start, found in windows.items()]  # type: ignore[arg-type]
    await store(session, [gateway_report(packed, sequence=sequence)], at)
    await session.execute(text("UPDATE telemetry_windows SET recorded_at = to_timestamp(:at)"), {"at": at})


CORE = CoreReady(
    boot_epoch=BOOT,
    model=MODEL,
    max_model_len=2048,
    block_size=16,
    total_blocks=512,
    forward="captured",
    weights="int8",
)


async def two_replicas(session: AsyncSession) -> None:
    await fleet.ensure_pool(session, POOL, MODEL)
    await store(session, [report("r1", ready=CORE), report("r2")], NOW)
    await session.execute(text("UPDATE replicas SET last_report_at = to_timestamp(:at)"), {"at": NOW - 1})


async def live(redis: Redis, replica: str, **values: int) -> None:
    gauges = LiveGauges(at=NOW, boot_epoch=BOOT, gauges=Gauges(**values))
    await redis.set(gauges_key(replica), encode(gauges))


def exact(values: list[float], q: float) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


def assert_quantiles(found: Quantiles, values: list[float]) -> None:
    assert found.n == len(values)
    for q, evidence in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        if not values:
            assert evidence is None
        else:
            assert evidence is not None and evidence.error <= BUCKET_WIDTH
            assert evidence.value == pytest.approx(exact(values, q), rel=BUCKET_WIDTH)


def assert_figures(found: Figures, requests: list[Request], span_s: float) -> None:
    """Every gateway-side figure of `found` against the requests themselves."""
    prompt = sum(one.prompt for one in requests)
    assert found.accepted == sum(found.finished.values()) == len(requests)
    for evidence, amount in (
        (found.request_rate, len(requests)),
        (found.prompt_rate, prompt),
        (found.output_rate, sum(one.output for one in requests)),
    ):
        assert evidence is not None
        assert evidence.window_s == span_s
        assert evidence.value == pytest.approx(amount / span_s)
    if prompt:
        assert found.prefix_hit is not None
        assert found.prefix_hit.value == pytest.approx(sum(one.cached for one in requests) / prompt)
        assert found.prefix_hit.n == len(requests)
    assert_quantiles(found.ttft, [one.ttft for one in requests])
    assert_quantiles(found.tpot, [one.tpot for one in requests])


async def test_all_figures_equal_those_computed_from_every_request(
    session: AsyncSession, redis: Redis, rng: random.Random
) -> None:
    await two_replicas(session)
    inside = some_requests(rng, 400, range(-29, 1))
    outside = some_requests(rng, 50, range(-60, -30))
    await send(session, inside + outside)
    found = await overview(session, redis, now=NOW)
    span_s = 29 * 10 + 4.0
    assert_figures(found.total, inside, span_s)
    assert [row.key for row in found.by_replica] == ["r1", "r2"]
    for row in found.by_replica:
        assert row.state == ReplicaState.READY
        assert row.ready == (CORE if row.key == "r1" else None)
        assert_figures(row.figures, [one for one in inside if one.replica == row.key], span_s)
    assert [row.key for row in found.by_tenant] == ["acme", "globex"]
    for row in found.by_tenant:
        assert_figures(row.figures, [one for one in inside if one.tenant == row.key], span_s)


async def test_filters_narrow_to_one_tenant_or_replica(session: AsyncSession, redis: Redis, rng: random.Random) -> None:
    await two_replicas(session)
    requests = some_requests(rng, 200, range(-29, 1))
    await send(session, requests)
    found = await overview(session, redis, now=NOW, tenant="acme")
    assert_figures(found.total, [one for one in requests if one.tenant == "acme"], 294.0)
    assert [row.key for row in found.by_tenant] == ["acme"]
    assert found.total.kv_used is None, "a tenant has no KV blocks of its own"
    found = await overview(session, redis, now=NOW, replica="r2")
    assert_figures(found.total, [one for one in requests if one.replica == "r2"], 294.0)
    assert [row.key for row in found.by_replica] == ["r2"]
    found = await overview(session, redis, now=NOW, tenant="globex", replica="r1")
    both = [one for one in requests if (one.tenant, one.replica) == ("globex", "r1")]
    assert_figures(found.total, both, 294.0)


async def test_canaries_have_a_line_of_their_own_and_no_part_in_the_sums(
    session: AsyncSession, redis: Redis, rng: random.Random
) -> None:
    await two_replicas(session)
    requests = some_requests(rng, 60, range(-29, 1))
    canaries = [replace(one, tenant=PROBE_TENANT) for one in some_requests(rng, 140, range(-29, 1))]
    await send(session, requests + canaries)
    found = await overview(session, redis, now=NOW)
    assert_figures(found.total, requests, 294.0)
    for row in found.by_replica:
        assert_figures(row.figures, [one for one in requests if one.replica == row.key], 294.0)
    probe = next(row for row in found.by_tenant if row.key == PROBE_TENANT)
    assert_figures(probe.figures, canaries, 294.0)
    for at, rate in zip(found.series.at, found.series.request_rate, strict=True):
        assert rate == pytest.approx(len([one for one in requests if one.window == at]) / (4.0 if at == LAST else 10.0))
    asked = await overview(session, redis, now=NOW, tenant=PROBE_TENANT)
    assert_figures(asked.total, canaries, 294.0)


async def test_series_have_a_point_per_span_with_gaps_as_none(
    session: AsyncSession, redis: Redis, rng: random.Random
) -> None:
    await two_replicas(session)
    requests = [one for one in some_requests(rng, 300, range(-29, 1)) if one.window not in (LAST - 50, LAST - 60)]
    await send(session, requests)
    found = (await overview(session, redis, now=NOW)).series
    assert found.at == list(range(LAST - 290, LAST + 1, 10))
    for i, at in enumerate(found.at):
        here = [one for one in requests if one.window == at]
        if not here:
            assert (found.request_rate[i], found.ttft_p50[i], found.prefix_hit[i]) == (None, None, None)
            continue
        length = 4.0 if at == LAST else 10.0
        assert found.request_rate[i] == pytest.approx(len(here) / length)
        assert found.output_rate[i] == pytest.approx(sum(one.output for one in here) / length)
        assert found.ttft_p95[i] == pytest.approx(exact([one.ttft for one in here], 0.95), rel=BUCKET_WIDTH)
        assert found.tpot_p50[i] == pytest.approx(exact([one.tpot for one in here], 0.50), rel=BUCKET_WIDTH)
    assert all(len(getattr(found, name)) == 30 for name in found.__struct_fields__)
    assert [found.request_rate[found.at.index(LAST - offset)] for offset in (50, 60)] == [None, None]


async def test_rates_are_over_the_time_there_is_data_for(session: AsyncSession, redis: Redis) -> None:
    await two_replicas(session)
    await send(session, [Request(LAST - 10, "acme", "r1", 0.1, 0.01, 10, 0, 5)] * 7)
    rate = (await overview(session, redis, now=NOW)).total.request_rate
    assert rate is not None
    assert (rate.value, rate.window_s) == (pytest.approx(7 / 14.0), 14.0)


async def test_a_quiet_gateway_shows_zero_and_an_absent_one_shows_nothing(session: AsyncSession, redis: Redis) -> None:
    found = await overview(session, redis, now=NOW)
    assert found.total.request_rate is None
    assert found.last_report_at is None
    assert found.series.request_rate == [None] * 30
    await send(session, [])
    found = await overview(session, redis, now=NOW)
    assert found.total.request_rate is not None and found.total.request_rate.value == 0.0
    assert found.series.request_rate[-1] == 0.0 and found.series.request_rate[:-1] == [None] * 29
    assert found.total.ttft.n == 0 and found.total.ttft.p50 is None
    assert found.last_report_at == pytest.approx(NOW)


async def test_kv_use_waste_running_and_waiting_are_those_of_now(session: AsyncSession, redis: Redis) -> None:
    await two_replicas(session)
    await live(redis, "r1", running=3, waiting=1, blocks_total=100, blocks_used=60, block_size=16, kv_slots_empty=96)
    await live(redis, "r2", running=1, waiting=0, blocks_total=300, blocks_used=20, block_size=16, kv_slots_empty=64)
    found = await overview(session, redis, now=NOW)
    total = found.total
    assert total.kv_used is not None and total.kv_used.value == pytest.approx(80 / 400)
    assert total.kv_waste is not None and total.kv_waste.value == pytest.approx(160 / (80 * 16))
    assert total.running is not None and (total.running.value, total.running.n) == (4, 2)
    assert total.waiting is not None and total.waiting.value == 1
    first = found.by_replica[0].figures
    assert first.kv_used is not None and first.kv_used.value == pytest.approx(0.6)


async def test_f19_a_silent_replica_is_shown_as_such_and_its_gauges_are_not_counted(
    session: AsyncSession, redis: Redis
) -> None:
    await two_replicas(session)
    for replica in ("r1", "r2"):
        await live(redis, replica, running=2, blocks_total=100, blocks_used=50, block_size=16)
    await session.execute(text("UPDATE replicas SET state = 'stale' WHERE id = 'r2'"))
    found = await overview(session, redis, now=NOW)
    assert found.total.running is not None and (found.total.running.value, found.total.running.n) == (2, 1)
    assert found.by_replica[1].state == "stale" and found.by_replica[1].figures.running is None


async def test_f14_without_redis_gauges_come_from_the_newest_window(session: AsyncSession) -> None:
    await fleet.ensure_pool(session, POOL, MODEL)
    old, new = (
        engine_window(start, running=running, blocks_used=used, blocks_total=100, kv_slots_empty=8)
        for start, running, used in ((LAST - 10, 9, 90), (LAST, 2, 30))
    )
    await store(session, [report("r1", windows=[new, old])], NOW)
    nowhere = Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.2)
    found = await overview(session, nowhere, now=NOW)
    await nowhere.aclose()
    assert found.total.running is not None and found.total.running.value == 2
    assert found.total.kv_used is not None and found.total.kv_used.value == pytest.approx(0.3)
    assert found.series.kv_used[-2:] == [pytest.approx(0.9), pytest.approx(0.3)]


async def test_f29_engine_prefix_hit_counts_first_attempts_only(session: AsyncSession, redis: Redis) -> None:
    await fleet.ensure_pool(session, POOL, MODEL)
    window = engine_window(LAST, ttft=[0.05], queries=200, hits=50)
    window.counters.memory.recompute_queries = 1000
    window.counters.memory.recompute_hits = 1000
    await store(session, [report("r1", windows=[window])], NOW)
    total = (await overview(session, redis, now=NOW)).total
    assert total.engine_prefix_hit is not None
    assert (total.engine_prefix_hit.value, total.engine_prefix_hit.source) == (0.25, "engines")
    assert total.engine_ttft.n == 1 and total.ttft.n == 0, "the two sides are never averaged together"


async def test_f30_fields_of_a_newer_reporter_do_not_break_the_page(session: AsyncSession, redis: Redis) -> None:
    await fleet.ensure_pool(session, POOL, MODEL)
    await store(session, [report("r1", windows=[Window(start=LAST, counters=Counters())])], NOW)
    newer = encode({"start": LAST, "counters": {"service": {"invented": {"x": 1}}, "quantum": 3}, "gauge_samples": 0})
    await session.execute(text("UPDATE telemetry_windows SET data = :data WHERE source = 'engine'"), {"data": newer})
    assert (await overview(session, redis, now=NOW)).total.engine_ttft.n == 0


async def test_f31_the_overview_costs_at_most_five_queries(
    session: AsyncSession, redis: Redis, rng: random.Random
) -> None:
    await two_replicas(session)
    await send(session, some_requests(rng, 100, range(-29, 1)))
    statements: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    connection = (await session.connection()).sync_connection
    event.listen(connection, "before_cursor_execute", record)
    await overview(session, redis, now=NOW)
    event.remove(connection, "before_cursor_execute", record)
    assert len(statements) <= 5


@pytest.mark.parametrize("window_s", [0, 59, 65, 3610, -300])
async def test_an_impossible_window_is_refused(session: AsyncSession, redis: Redis, window_s: int) -> None:
    with pytest.raises(InvalidRequestError):
        await overview(session, redis, now=NOW, window_s=window_s)
