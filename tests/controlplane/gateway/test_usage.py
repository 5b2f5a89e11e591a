"""What the gateway puts down for the ledger: one record for each attempt that a replica took, with its basis (F7)."""

from __future__ import annotations

import asyncio
import random

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from controlplane.gateway.usage_metrics import UsageCollector
from controlplane.ledger.spool import HEADROOM
from controlplane.settings import Settings
from controlplane.telemetry.validation import check_usage
from dataplane.protocol import HEADER_ATTEMPT, UsageBasis
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import (
    CHAT,
    STREAM,
    Running,
    assert_nothing_left,
    check_error,
    route,
    running_gateway,
)
from tests.controlplane.gateway.metered import ASK, ASK_STREAM
from tests.controlplane.gateway.replicas import COMPLETION, FakeReplica, chunk, event, fake_replica, parts


async def finished(served: Running, body: dict[str, object]) -> int:
    async with served.post(body) as response:
        await response.read()
        return response.status


async def test_f7_an_answer_is_recorded_once_as_the_engine_counted_it(served: Running, replica: FakeReplica) -> None:
    for body in (CHAT, STREAM):
        assert await finished(served, body) == 200
    await assert_nothing_left(served)
    found = await served.usage()
    assert [one.attempt_id for one in found] == [seen.headers[HEADER_ATTEMPT] for seen in replica.seen]
    for one in found:
        assert (one.basis, one.prompt_tokens, one.cached_tokens, one.output_tokens) == (UsageBasis.ENGINE, 12, 8, 3)
        assert (one.tenant, one.pool, one.replica, one.model, one.finish) == ("acme", "pool-m", "r0", "m", "stop")
        assert one.key_id == served.key.split("_")[1]
        check_usage(one, "r0")


async def test_f7_an_answer_that_says_nothing_is_estimated_by_what_was_asked_for(
    served: Running, replica: FakeReplica
) -> None:
    silent = {name: value for name, value in COMPLETION.items() if name != "usage"}
    replica.behave = replicas.error(200, silent)
    for body in (ASK, ASK_STREAM):  # whoever asked for a stream and is given none has not had nothing
        assert await finished(served, body) == 200
    await assert_nothing_left(served)
    found = await served.usage()
    assert len(found) == 2
    for one in found:
        assert (one.basis, one.output_tokens, one.cached_tokens) == (UsageBasis.ESTIMATED, 100, 0)
        assert one.prompt_tokens > 0
    assert [line["ttft_s"] for line in await served.lines()] == [None, None]


async def test_f7_a_client_that_leaves_at_any_point_is_recorded_with_what_was_relayed(
    served: Running, replica: FakeReplica, rng: random.Random
) -> None:
    replica.behave = replicas.stream_forever
    told: list[int] = []
    for _ in range(6):
        stop_after = rng.randint(1, 12)
        async with served.post(ASK_STREAM) as response:
            seen = 0
            async for line in response.content:
                seen += line.startswith(b"data: ")
                if seen >= stop_after:
                    break
            response.close()
        told.append(seen)
        await assert_nothing_left(served)
    found = await served.usage()
    assert len(found) == len(told)
    for one, seen in zip(found, told, strict=True):
        assert (one.basis, one.finish) == (UsageBasis.COUNTED, "abort")
        assert one.output_tokens >= seen, "what the client got is in it"
        assert one.prompt_tokens > 0


async def test_f7_a_replica_that_stops_in_the_middle_leaves_what_it_had_sent(
    served: Running, replica: FakeReplica
) -> None:
    replica.behave = parts([event(chunk("a")), event(chunk("b"))], end=False)
    await finished(served, ASK_STREAM)
    (one,) = await served.usage()
    assert (one.basis, one.finish, one.output_tokens) == (UsageBasis.COUNTED, "error", 2)


async def test_what_no_replica_took_is_not_recorded(served: Running, replica: FakeReplica) -> None:
    error = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_value"}}
    for behave in (replicas.error(400, error), replicas.reset, replicas.error(503, error)):
        replica.behave = behave
        assert await finished(served, CHAT) >= 400
    assert await finished(served, {"model": "unknown", "messages": []}) == 404
    assert await served.usage() == []


async def test_a_request_sent_to_a_second_replica_is_recorded_for_that_one(
    offline_settings: Settings, replica: FakeReplica
) -> None:
    async with fake_replica() as broken:
        broken.behave = replicas.reset
        async with running_gateway(offline_settings, route(broken, "r0"), route(replica, "r1")) as served:
            for _ in range(6):
                assert await finished(served, CHAT) == 200
            found = await served.usage()
    assert {one.replica for one in found} == {"r1"} and len(found) == 6
    assert [one.attempt_id for one in found] == [seen.headers[HEADER_ATTEMPT] for seen in replica.seen]


async def test_no_answer_waits_for_the_disk(
    served: Running, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk that takes for ever the answers come all the same, and what they used is written afterwards."""
    spool = served.gateway.usage._spool
    assert spool is not None
    go_on = asyncio.Event()
    real = spool._make_durable

    async def stuck(data: bytes) -> object:
        await go_on.wait()
        return await real(data)

    monkeypatch.setattr(spool, "_make_durable", stuck)
    for _ in range(5):
        assert await finished(served, CHAT) == 200
    go_on.set()
    assert len(await served.usage()) == 5


async def test_a_full_spool_refuses_new_requests_by_name_and_takes_them_again_when_there_is_room(
    offline_settings: Settings, replica: FakeReplica
) -> None:
    size = 1 << 20
    async with running_gateway(offline_settings, route(replica, "r0"), spool_bytes=size) as served:
        spool = served.gateway.usage._spool
        assert spool is not None
        room = size - size // HEADROOM
        while spool.held_bytes < room:
            await spool.append(b"x" * 60_000)
        async with served.post(CHAT) as response:
            assert response.status == 503
            check_error(await response.json(), "usage_spool_full")
            assert "retry-after" in response.headers
        assert served.gateway.usage.state().full
        assert replica.seen == [], "nothing is dispatched that could not be recorded"
        spool.trim(spool._end())
        assert not served.gateway.usage.state().full
        assert await finished(served, CHAT) == 200


async def test_what_finds_no_room_is_counted_and_stops_nobody(offline_settings: Settings, replica: FakeReplica) -> None:
    async with running_gateway(offline_settings, route(replica, "r0"), spool_bytes=1 << 20) as served:
        usage, spool = served.gateway.usage, served.gateway.usage._spool
        assert spool is not None
        gate = asyncio.Event()

        async def wait(request: web.Request, body: bytes) -> web.StreamResponse:
            await gate.wait()
            return await replicas.answer(request, body)

        replica.behave = wait
        running = asyncio.create_task(finished(served, CHAT))
        while not replica.seen:
            await asyncio.sleep(0.01)
        while spool.held_bytes < (1 << 20) - 60_100:
            await spool.append(b"x" * 60_000)
        await spool.append(b"x" * ((1 << 20) - spool.held_bytes - 100))
        gate.set()
        assert await running == 200
        await assert_nothing_left(served)
        assert (usage.lost, usage.written) == (1, 0)


async def test_f32_the_state_of_the_spool_is_on_metrics_without_labels(
    offline_settings: Settings, replica: FakeReplica
) -> None:
    registry = CollectorRegistry()
    async with running_gateway(offline_settings, route(replica, "r0")) as served:
        UsageCollector(served.gateway.usage, registry)
        assert await finished(served, CHAT) == 200
        assert len(await served.usage()) == 1
        found = {sample.name: sample for family in registry.collect() for sample in family.samples}
    assert all(sample.labels == {} for sample in found.values())
    assert found["tidegate_gateway_usage_records_total"].value == 1
    assert found["tidegate_gateway_usage_spool_bytes"].value > 100
    assert found["tidegate_gateway_usage_spool_age_seconds"].value >= 0
    assert found["tidegate_gateway_usage_spool_full"].value == 0
    assert found["tidegate_gateway_usage_records_shipped_total"].value == 0
