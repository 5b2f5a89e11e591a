"""Clients that leave, read slowly or come by the hundred, and the gateway's own end: nothing leaks (F12, F37)."""

from __future__ import annotations

import asyncio
import json
import random
import time

import aiohttp
import msgspec
import pytest

from controlplane.settings import Settings
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import (
    CHAT,
    STREAM,
    assert_nothing_left,
    head_of,
    route,
    running_gateway,
    stream_error,
)
from tests.controlplane.gateway.replicas import DONE, chunk, event, fake_replica, parts, usage_chunk

UNAVAILABLE = {"error": {"message": "starting", "type": "server_error", "param": None, "code": "core_starting"}}


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_client_that_leaves_before_the_first_byte_frees_the_replica_at_once(
    offline_settings: Settings, body: dict[str, object]
) -> None:
    async with (
        fake_replica(replicas.hang) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        with pytest.raises(TimeoutError):
            await served.post(body, timeout=aiohttp.ClientTimeout(total=0.2))
        async with asyncio.timeout(2):
            await replica.left.wait()
        await served.settled(1)
        line = (await served.lines())[0]
        assert (line["outcome"], line["status"], line["error_code"]) == ("cancelled", 499, None)
        assert served.total().cancelled == 1
        await assert_nothing_left(served)


async def test_f12_a_client_that_left_before_anybody_asked_is_noticed(
    offline_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.gateway.departure.ASK_AFTER_S", 0.3)
    body = json.dumps(CHAT).encode()
    async with (
        fake_replica(replicas.hang) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        writer.write(head_of(served, len(body)) + body)
        async with asyncio.timeout(10):
            while not replica.seen:
                await asyncio.sleep(0.005)
        writer.close()
        async with asyncio.timeout(10):
            await replica.left.wait()
        await served.settled(1)
        assert served.total().cancelled == 1
        await assert_nothing_left(served)


async def test_a_client_that_leaves_a_stream_frees_the_replica_at_once(offline_settings: Settings) -> None:
    async with (
        fake_replica(replicas.stream_forever) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        response = await served.post(STREAM)
        await response.content.readany()
        left = time.monotonic()
        response.close()
        async with asyncio.timeout(2):
            await replica.left.wait()
        assert time.monotonic() - left < 1.0
        await served.settled(1)
        line = (await served.lines())[0]
        assert line["outcome"] == "cancelled"
        assert line["ttft_s"] > 0
        await assert_nothing_left(served)


async def test_a_client_that_leaves_while_sending_its_body_is_forgotten(offline_settings: Settings) -> None:
    async with fake_replica() as replica, running_gateway(offline_settings, route(replica, "r0")) as served:
        port = int(served.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {served.key}\r\ncontent-length: 99\r\n"
        )
        writer.write(head.encode() + b'\r\n{"model"')
        await writer.drain()
        async with asyncio.timeout(5):
            while not served.gateway.in_flight:
                await asyncio.sleep(0.01)
        writer.close()
        await served.settled(1)
        assert served.total().cancelled == 1
        assert not replica.seen
        await assert_nothing_left(served)


async def test_a_client_that_never_sends_its_body_is_let_go(
    offline_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.gateway.asgi.BODY_TIMEOUT_S", 0.2)
    async with fake_replica() as replica, running_gateway(offline_settings, route(replica, "r0")) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {served.key}\r\ncontent-length: 99\r\n"
        )
        writer.write(head.encode() + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        await assert_nothing_left(served)


def tasks_but_the_replicas() -> int:
    """Tasks in this loop, without the test replicas' own for idle connections."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return sum(coroutine is not None and "RequestHandler" not in coroutine.__qualname__ for coroutine in coroutines)


@pytest.mark.parametrize("streams", [240, pytest.param(2000, marks=pytest.mark.slow)])
async def test_f37_many_streams_opened_and_left_leave_nothing(
    offline_settings: Settings, rng: random.Random, streams: int
) -> None:
    """Streams left at random moments: before headers, in mid-stream, at the end."""
    async with (
        fake_replica(replicas.stream_forever) as endless,
        fake_replica(parts([event(chunk("a")), event(usage_chunk()), DONE], pause=0.01)) as short,
        running_gateway(offline_settings, route(endless, "endless"), route(short, "short")) as served,
    ):

        async def visit(number: int) -> None:
            async with asyncio.timeout(rng.uniform(0.001, 0.15)):
                async with served.post(STREAM, headers={"connection": "close"} if number % 2 else {}) as response:
                    await response.content.read()

        before = tasks_but_the_replicas()
        for start in range(0, streams, 30):
            await asyncio.gather(*(visit(i) for i in range(start, start + 30)), return_exceptions=True)
        async with asyncio.timeout(60):
            while served.gateway.in_flight or endless.active or short.active:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)
        await assert_nothing_left(served)
        assert tasks_but_the_replicas() <= before
        total = served.total()
        ended = sum(total.finished.values()) + sum(total.failed.values())
        assert total.accepted == ended + total.cancelled > 0
        assert total.failed == {}


async def test_every_request_ends_in_exactly_one_outcome_and_was_accepted_unless_refused(
    offline_settings: Settings, rng: random.Random
) -> None:
    """A mix of all behaviours at once: sums of counters and lines of the log agree."""
    behaviours: list[replicas.Behave] = [
        replicas.answer,
        replicas.reset,
        replicas.error(400, {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "x"}}),
        replicas.error(500, {"error": {"message": "no", "type": "server_error", "param": None, "code": "x"}}),
        replicas.error(503, UNAVAILABLE),
        parts([event(chunk("a"))], end=False),
        parts([event(chunk("a"))], end=True),
        replicas.stream_forever,
    ]

    async def mixed(request: aiohttp.web.Request, body: bytes) -> aiohttp.web.StreamResponse:
        return await rng.choice(behaviours)(request, body)

    async with (
        fake_replica(mixed) as a,
        fake_replica(mixed) as b,
        running_gateway(offline_settings, route(a, "a"), route(b, "b")) as served,
    ):

        async def visit() -> None:
            async with asyncio.timeout(1.0):
                async with served.post(rng.choice([CHAT, STREAM, {"model": "nope"}, b"{"])) as response:
                    await response.read()

        for _ in range(6):
            await asyncio.gather(*(visit() for _ in range(25)), return_exceptions=True)
        async with asyncio.timeout(10):
            while served.gateway.in_flight:
                await asyncio.sleep(0.02)
        total, lines = served.total(), await served.lines()
        assert total.accepted == len(lines) - sum(total.refused.values())
        for outcome, counted in (
            ("finished", sum(total.finished.values())),
            ("refused", sum(total.refused.values())),
            ("failed", sum(total.failed.values())),
            ("cancelled", total.cancelled),
        ):
            assert counted == sum(line["outcome"] == outcome for line in lines)
        assert total.ttft is not None
        assert total.ttft.count == sum(line["ttft_s"] is not None for line in lines)
        await assert_nothing_left(served)


async def test_a_slow_reader_holds_up_only_itself(offline_settings: Settings) -> None:
    """A client that does not read makes the gateway stop reading from the replica, instead of buffering without end."""
    sent = 0

    async def flood(request: aiohttp.web.Request, body: bytes) -> aiohttp.web.StreamResponse:
        nonlocal sent
        response = await replicas.start_stream(request)
        piece = event(chunk("x" * 8000))
        while sent < 200_000_000:
            await response.write(piece)
            sent += len(piece)
        return response

    async with fake_replica(flood) as replica, running_gateway(offline_settings, route(replica, "r0")) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        body = json.dumps(STREAM).encode()
        writer.write(head_of(served, len(body)) + body)
        await asyncio.sleep(1.0)
        held = sent
        await asyncio.sleep(0.3)
        assert sent == held < 100_000_000
        async with served.post(STREAM) as response:
            assert response.status == 200
            assert await response.content.readany()
        writer.close()
        await served.settled(2)
        await assert_nothing_left(served)


async def test_shutdown_lets_running_requests_finish_and_then_cuts_them_with_an_error(
    offline_settings: Settings,
) -> None:
    slow = parts([event(chunk("a"))] * 10 + [event(chunk(finish="stop")), event(usage_chunk()), DONE], pause=0.03)
    async with (
        fake_replica(slow) as replica,
        fake_replica(replicas.stream_forever) as endless,
        fake_replica(replicas.hang) as silent,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        finishing = await served.post(STREAM)
        served.policy.view = msgspec.structs.replace(served.policy.view, replicas=[route(endless, "r1")])
        await served.gateway.fleet.refresh()
        streaming = await served.post(STREAM)
        served.policy.view = msgspec.structs.replace(served.policy.view, replicas=[route(silent, "r2")])
        await served.gateway.fleet.refresh()
        waiting = asyncio.create_task(served.post(STREAM).__aenter__())
        while served.gateway.in_flight < 3:
            await asyncio.sleep(0.01)
        drain = asyncio.create_task(served.gateway.drain(1.0))
        await asyncio.sleep(0)
        async with served.post(CHAT) as refused:
            assert refused.status == 503
            assert (await refused.json())["error"]["code"] == "gateway_shutdown"
        assert (await finishing.read()).endswith(DONE)
        assert (await stream_error(streaming))["code"] == "gateway_shutdown"
        cut = await waiting
        assert cut.status == 503
        await drain
        await served.settled(4)
        assert served.total().finished == {"stop": 1}
        assert served.total().failed == {"gateway_shutdown": 2}
        await assert_nothing_left(served)


async def test_concurrent_streams_all_finish(offline_settings: Settings) -> None:
    pieces = [event(chunk("", role="assistant")), *[event(chunk(f"t{i} ")) for i in range(20)]]
    behave = parts([*pieces, event(chunk(finish="length")), event(usage_chunk()), DONE], pause=0.002)
    async with (
        fake_replica(behave) as a,
        fake_replica(behave) as b,
        running_gateway(offline_settings, route(a, "a"), route(b, "b")) as served,
    ):

        async def visit() -> bytes:
            async with served.post(STREAM) as response:
                return await response.read()

        bodies = await asyncio.gather(*(visit() for _ in range(64)))
        expected = b"".join([*pieces, event(chunk(finish="length")), DONE])
        assert set(bodies) == {expected}
        assert abs(len(a.seen) - len(b.seen)) <= 2  # spread by what is in flight
        await assert_nothing_left(served)
