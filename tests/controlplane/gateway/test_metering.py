"""No request without a lease, and what leases make of requests: through the real server, on a real Redis."""

from __future__ import annotations

import asyncio
import random
import time

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs
from redis.asyncio import Redis

from controlplane.ledger.costing import PriceList
from controlplane.quotas.schemas import Away, Price, QuotaKind, QuotaLevel
from controlplane.settings import Settings
from dataplane.protocol import HEADER_ARRIVED
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import assert_nothing_left, route, running_gateway
from tests.controlplane.gateway.metered import (
    ASK,
    ASK_STREAM,
    CONCURRENT,
    DAY,
    IN,
    LARGE,
    MONEY,
    OUT,
    RPM,
    TENANT,
    TPM,
    USED,
    Gate,
    all_settled,
    answer_of,
    limit,
    used,
)
from tests.controlplane.gateway.replicas import chunk, event, fake_replica, parts
from tests.controlplane.telemetry.reports import usage


async def test_f2_of_two_hundred_at_once_with_room_for_one_exactly_one_passes(own: Settings) -> None:
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=(limit(RPM, 1),)) as served:
        answers = await asyncio.gather(*(answer_of(served) for _ in range(200)))
        codes = [code for _, code, _ in answers]
        assert codes.count("") == 1
        assert codes.count("requests_per_minute_exceeded") == 199
        assert len(replica.seen) == 1
        await all_settled(served)


async def test_f2_tokens_are_reserved_for_the_worst_case_of_all_that_run_at_once(own: Settings) -> None:
    gate = Gate()
    async with (
        fake_replica(gate.behave) as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(OUT, 350),)) as served,
    ):
        running = [asyncio.create_task(answer_of(served, ASK_STREAM)) for _ in range(40)]
        async with asyncio.timeout(20):
            while sum(task.done() for task in running) < 37 or len(replica.seen) < 3:
                await asyncio.sleep(0.01)
        assert len(replica.seen) == 3  # of 100 each
        gate.open.set()
        codes = [code for _, code, _ in await asyncio.gather(*running)]
        assert codes.count("") == 3
        assert codes.count("output_tokens_per_minute_exceeded") == 37
        await all_settled(served)
        assert await used(served, limit(OUT, 350)) == 3 * 3


async def test_a_tenant_without_limits_costs_no_call(own: Settings) -> None:
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0")) as served:
        status, _, response = await answer_of(served)
        assert status == 200
        assert not [name for name in response.headers if name.lower().startswith("x-ratelimit")]
        assert served.gateway.meter.leases.tally.granted == 0


async def test_f4_remaining_falls_at_admission_and_rises_at_settlement(own: Settings) -> None:
    gate = Gate()
    tokens = limit(TPM, 10_000)
    async with (
        fake_replica(gate.behave) as replica,
        running_gateway(own, route(replica, "r0"), limits=(tokens, limit(RPM, 60))) as served,
    ):

        def said(response: aiohttp.ClientResponse) -> tuple[int, int]:
            return tuple(int(response.headers[f"x-ratelimit-remaining-{name}"]) for name in ("requests", "tokens"))  # type: ignore[return-value]

        first = await served.post(ASK_STREAM)
        assert first.headers["x-ratelimit-limit-tokens"] == "10000"
        assert first.headers["x-ratelimit-limit-requests"] == "60"
        assert 0 < int(first.headers["x-ratelimit-reset-tokens"]) <= 61
        requests, remaining = said(first)
        worst = 10_000 - remaining
        assert requests == 59
        assert 100 < worst < 1000
        second = await served.post(ASK_STREAM)
        assert said(second) == (58, 10_000 - 2 * worst)
        gate.open.set()
        await asyncio.gather(first.read(), second.read())
        await all_settled(served)
        assert await used(served, tokens) == 2 * USED
        third = await served.post(ASK_STREAM)
        assert said(third) == (57, 10_000 - 2 * USED - worst)
        await third.read()


@pytest.mark.parametrize("body", [ASK, ASK_STREAM])
async def test_f7_what_finished_is_settled_to_what_the_engine_said(own: Settings, body: dict[str, object]) -> None:
    limits = tuple(limit(kind, LARGE) for kind in (TPM, IN, OUT, QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE))
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=limits) as served:
        assert (await answer_of(served, body))[0] == 200
        await all_settled(served)
        assert [await used(served, one) for one in limits] == [15, 12, 3, 4]  # 8 of the prompt were cached


async def test_f7_a_stream_that_was_left_is_settled_to_what_was_relayed(own: Settings) -> None:
    gate = Gate()
    output, read, requests = limit(OUT, LARGE), limit(IN, LARGE), limit(RPM, LARGE)
    async with (
        fake_replica(gate.behave) as replica,
        running_gateway(own, route(replica, "r0"), limits=(output, read, requests)) as served,
    ):
        response = await served.post(ASK_STREAM)
        await response.content.readany()
        assert await used(served, output) == 100
        reserved = await used(served, read)
        response.close()
        await all_settled(served)
        assert await used(served, output) == 1
        assert await used(served, read) == reserved  # the replica was given the prompt and has not said how long it is
        assert await used(served, requests) == 1


async def test_f7_whoever_leaves_an_answer_that_was_not_streamed_pays_what_was_reserved_for_it(own: Settings) -> None:
    begun = asyncio.Event()

    async def work(request: web.Request, body: bytes) -> web.StreamResponse:
        begun.set()
        await asyncio.sleep(60)
        raise AssertionError("the gateway has not closed the connection")

    output, held = limit(OUT, LARGE), limit(CONCURRENT, LARGE)
    async with (
        fake_replica(work) as replica,
        running_gateway(own, route(replica, "r0"), limits=(output, held)) as served,
    ):
        asking = asyncio.create_task(answer_of(served))
        await begun.wait()
        asking.cancel()
        await all_settled(served)
        assert await used(served, output) == 100
        assert await used(served, held) == 0


@pytest.mark.parametrize("body", [ASK, ASK_STREAM])
async def test_f7_whoever_leaves_before_a_replica_was_sent_anything_pays_nothing(
    own: Settings, monkeypatch: pytest.MonkeyPatch, body: dict[str, object]
) -> None:
    connecting = asyncio.Event()

    async def never(*_: object) -> tuple[str, ...]:
        connecting.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr("controlplane.gateway.guarded.GuardedAddresses.of", never)
    tokens, requests = limit(TPM, LARGE), limit(RPM, LARGE)
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(tokens, requests)) as served,
    ):
        asking = asyncio.create_task(answer_of(served, body))
        await connecting.wait()
        asking.cancel()
        await all_settled(served)
        assert (await used(served, tokens), await used(served, requests)) == (0, 0)
        assert await served.usage() == []
        await assert_nothing_left(served)


async def test_f7_a_stream_that_breaks_is_settled_to_what_was_relayed(own: Settings) -> None:
    output = limit(OUT, LARGE)
    broken = parts([event(chunk("a")), event(chunk("b"))], end=False)
    async with fake_replica(broken) as replica, running_gateway(own, route(replica, "r0"), limits=(output,)) as served:
        await answer_of(served, ASK_STREAM)
        await all_settled(served)
        assert await used(served, output) == 2


@pytest.mark.parametrize(
    ("behave", "counted"),
    [
        (replicas.error(400, {"error": {"message": "no", "type": "t", "param": None, "code": "x"}}), 1),
        (replicas.error(500, {"error": {"message": "no", "type": "t", "param": None, "code": "x"}}), 0),
        (replicas.error(503, {"error": {"message": "no", "type": "t", "param": None, "code": "x"}}), 0),
        (replicas.reset, 0),
    ],
)
async def test_what_no_replica_served_takes_no_tokens_and_what_none_could_take_no_request(
    own: Settings, behave: replicas.Behave, counted: int
) -> None:
    requests, tokens = limit(RPM, LARGE), limit(TPM, LARGE)
    async with (
        fake_replica(behave) as replica,
        running_gateway(own, route(replica, "r0"), limits=(requests, tokens)) as served,
    ):
        assert (await answer_of(served))[0] >= 400
        await all_settled(served)
        assert (await used(served, requests), await used(served, tokens)) == (counted, 0)


async def test_a_retry_on_another_replica_keeps_its_lease(own: Settings) -> None:
    requests = limit(RPM, LARGE)
    async with (
        fake_replica(replicas.reset) as broken,
        fake_replica() as good,
        running_gateway(own, route(broken, "a"), route(good, "b"), limits=(requests,)) as served,
    ):
        for _ in range(8):
            assert (await answer_of(served))[0] == 200
        assert broken.seen
        await all_settled(served)
        assert served.gateway.meter.leases.tally.granted == 8
        assert await used(served, requests) == 8


async def test_without_any_replica_nothing_is_kept(own: Settings) -> None:
    requests = limit(RPM, LARGE)
    async with running_gateway(own, route("http://127.0.0.1:1", "gone"), limits=(requests,)) as served:
        assert (await answer_of(served))[0] == 503
        await all_settled(served)
        assert await used(served, requests) == 0


async def test_several_answers_are_reserved_for(own: Settings) -> None:
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(OUT, 299),)) as served,
    ):
        assert (await answer_of(served, {**ASK, "n": 3}))[0] == 429
        assert (await answer_of(served, {**ASK, "n": 2}))[0] == 200
        status, code, _ = await answer_of(served, {**ASK, "n": "2"})
        assert (status, code) == (400, "invalid_type")


async def test_limits_of_other_projects_keys_and_models_do_not_concern_a_request(own: Settings) -> None:
    limits = (
        limit(RPM, 0, quota_id="a", level=QuotaLevel.PROJECT, scope_id="another"),
        limit(RPM, 0, quota_id="b", level=QuotaLevel.KEY, scope_id="another"),
        limit(RPM, 0, quota_id="c", model="other"),
        limit(RPM, 0, quota_id="d", level=QuotaLevel.PROJECT, scope_id="theirs"),
    )
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), models=("m", "other"), limits=limits) as served,
    ):
        assert (await answer_of(served))[0] == 200
        status, code, _ = await answer_of(served, key=served.policy.key(project_id="theirs", project="theirs"))
        assert (status, code) == (429, "requests_per_minute_exceeded")


async def test_money_is_reserved_and_settled_at_the_pools_price(own: Settings) -> None:
    price = Price(
        pool="pool-m", uncached_input=2_000_000, cached_input=500_000, output=8_000_000, device_second=0, valid_from=0.0
    )
    money = limit(MONEY, 1_000_000)
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(money,), prices=(price,)) as served,
    ):
        assert (await answer_of(served))[0] == 200
        await all_settled(served)
        assert await used(served, money) == 4 * 2 + 8 // 2 + 3 * 8  # micro-units


async def test_a_price_set_while_a_request_runs_changes_neither_its_lease_nor_its_bill(own: Settings) -> None:
    gate, now, money = Gate(), time.time(), limit(MONEY, 1_000_000)
    amounts = {"pool": "pool-m", "uncached_input": 2_000_000, "cached_input": 500_000, "device_second": 0}
    cheap = Price(**amounts, output=8_000_000, valid_from=0.0, valid_until=now + 2)
    dear = Price(**amounts, output=80_000_000, valid_from=now + 2)
    async with (
        fake_replica(gate.behave) as replica,
        running_gateway(own, route(replica, "r0"), limits=(money,), prices=(cheap, dear)) as served,
    ):
        running = await served.post(ASK_STREAM)
        assert time.time() < now + 2, "it came before the new price"
        await asyncio.sleep(now + 2.1 - time.time())
        gate.open.set()
        await running.read()
        await all_settled(served)
        settled = await used(served, money)
        assert settled == 4 * 2 + 8 // 2 + 3 * 8  # micro-units
        arrived = float(replica.seen[0].headers[HEADER_ARRIVED])
        told = usage(pool="pool-m", started_at=arrived, prompt_tokens=12, cached_tokens=8, output_tokens=3)
        assert PriceList([cheap, dear]).cost(told) == settled, "the ledger bills the same"


@pytest.mark.parametrize("requests", [240, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_f12_clients_that_leave_at_random_moments_leave_no_lease(
    own: Settings, redis: Redis, rng: random.Random, requests: int
) -> None:
    held, minute = limit(CONCURRENT, LARGE), limit(RPM, LARGE)
    short = parts([event(chunk("a")), event(replicas.usage_chunk()), replicas.DONE], pause=0.01)
    async with (
        fake_replica(replicas.stream_forever) as endless,
        fake_replica(short) as brief,
        running_gateway(own, route(endless, "endless"), route(brief, "brief"), limits=(held, minute)) as served,
    ):
        longest, tally = 0.15, served.gateway.meter.leases.tally

        async def visit(number: int) -> None:
            async with asyncio.timeout(rng.uniform(0.001, longest)):
                headers = {"connection": "close"} if number % 2 else {}
                async with served.post(rng.choice([ASK, ASK_STREAM]), headers=headers) as response:
                    await response.content.read()

        visited = 0
        while visited < requests or tally.granted <= requests / 4:
            assert visited < 8 * requests
            granted = tally.granted
            await asyncio.gather(*(visit(visited + i) for i in range(40)), return_exceptions=True)
            visited += 40
            hardly_any = tally.granted - granted <= 10  # came as far as a lease: the machine is busy just now
            longest = min(20.0, longest * 2) if hardly_any else max(0.15, longest / 2)
        await all_settled(served, within_s=120.0)
        await assert_nothing_left(served)
        assert tally.granted > requests / 4
        assert await used(served, held) == 0
        assert await redis.keys("*:concurrent_requests:") == []


async def test_f13_a_stream_longer_than_its_lease_keeps_its_slot(own: Settings) -> None:
    gate = Gate()
    short = structs.replace(own, lease_ttl_s=3.0, lease_deadline_ms=900)
    async with (
        fake_replica(gate.behave) as replica,
        running_gateway(short, route(replica, "r0"), limits=(limit(CONCURRENT, 1),)) as served,
    ):
        first = await served.post(ASK_STREAM)
        begun = time.monotonic()
        async with asyncio.timeout(20):
            while time.monotonic() - begun < 5.0:
                assert (await answer_of(served, ASK_STREAM))[1] == "concurrent_requests_exceeded"
                await asyncio.sleep(0.2)
        gate.open.set()
        await first.read()
        await all_settled(served)
        assert served.gateway.meter.leases.tally.late == 0


async def test_f14_while_redis_is_away_each_limit_does_what_it_declares(offline_settings: Settings) -> None:
    """Nothing listens on the Redis of these settings."""
    for mode, expected in (
        ({"away": Away.CLOSED}, [503] * 5),
        ({"away": Away.LOCAL, "local": 2}, [200, 200, 503, 503, 503]),
        ({"away": Away.OPEN}, [200] * 5),
    ):
        async with (
            fake_replica() as replica,
            running_gateway(offline_settings, route(replica, "r0"), limits=(limit(RPM, 100, **mode),)) as served,
        ):
            answers = [await answer_of(served) for _ in range(5)]
            assert [status for status, _, _ in answers] == expected, mode
            for status, code, response in answers:
                if status == 503:
                    assert code == "quota_store_unavailable"
                    assert int(response.headers["retry-after"]) >= 1
                    assert "limit=requests_per_minute; scope=tenant" in response.headers["x-tidegate-reason"]
            assert served.metric("lease_store_away") == 1


async def test_a_ledger_that_cannot_be_asked_for_a_cold_counter_is_said_so(own: Settings) -> None:
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(DAY, LARGE),)) as served,
    ):
        await served.gateway.meter.quotas.of(TENANT)
        await served.gateway.keys.authenticate(f"Bearer {served.key}")
        served.policy.away = True
        assert (await answer_of(served))[:2] == (503, "quota_use_unknown")
        assert not replica.seen
        served.policy.away = False
        assert (await answer_of(served))[0] == 200
        served.policy.away = True  # the counter is warm now
        assert (await answer_of(served))[0] == 200


async def test_f15_a_tenant_whose_quotas_nobody_could_read_is_not_served_without_them(own: Settings) -> None:
    async with fake_replica() as replica, running_gateway(own, route(replica, "r0"), limits=(limit(RPM, 1),)) as served:
        other = served.policy.key(tenant_id="never-read", tenant="other")
        await served.gateway.keys.authenticate(f"Bearer {other}")
        await served.gateway.keys.authenticate(f"Bearer {served.key}")
        await served.gateway.meter.quotas.of(TENANT)
        served.policy.away = True
        assert (await answer_of(served, key=other))[:2] == (503, "policy_unavailable")
        assert (await answer_of(served))[0] == 200
        assert (await answer_of(served))[:2] == (429, "requests_per_minute_exceeded")
        assert len(replica.seen) == 1


async def test_shutdown_ends_leases_too(own: Settings) -> None:
    gate = Gate()
    held = limit(CONCURRENT, LARGE)
    async with (
        fake_replica(gate.behave) as replica,
        running_gateway(own, route(replica, "r0"), limits=(held,)) as served,
    ):
        streaming = await served.post(ASK_STREAM)
        await served.gateway.drain(0.1)
        assert b"gateway_shutdown" in await streaming.read()
        await all_settled(served)
        assert await used(served, held) == 0


async def test_shutdown_tells_who_waits_for_a_lease_that_it_was_cut(
    own: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(DAY, LARGE),)) as served,
    ):

        async def silent(*_: object) -> tuple[int, float]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        monkeypatch.setattr(served.gateway.meter, "_sum", silent)
        asking = asyncio.create_task(answer_of(served))
        await asked.wait()
        await served.gateway.drain(0.1)
        assert (await asking)[:2] == (503, "gateway_shutdown")
        assert served.total().failed == {"gateway_shutdown": 1}
        assert not replica.seen
        await all_settled(served)
