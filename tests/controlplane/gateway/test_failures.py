"""Replicas that refuse, reset, hang or die, and clients that leave: nobody waits in vain and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import time

import aiohttp
import msgspec
import pytest

from controlplane.fleet.schemas import ReplicaLoad
from controlplane.gateway import exchange
from controlplane.settings import Settings
from dataplane.protocol import ReplicaState
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import Running, route, running_gateway
from tests.controlplane.gateway.replicas import DONE, FakeReplica, chunk, event, fake_replica, parts, usage_chunk
from tests.services import free_port

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
UNAVAILABLE = {"error": {"message": "starting", "type": "server_error", "param": None, "code": "core_starting"}}


def nobody() -> str:
    """An address where nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


def own_tasks() -> set[str]:
    """Names of this gateway's tasks for requests: one to relay, one to watch."""
    running = {task.get_coro().__qualname__ for task in asyncio.all_tasks() if task.get_coro() is not None}  # type: ignore[union-attr]
    return {name for name in running if "Exchange" in name or "client_left" in name}


def upstream_connections(served: Running) -> int:
    """Connections to replicas that are in use."""
    assert served.gateway._upstream is not None
    return len(served.gateway._upstream._session.connector._acquired)  # type: ignore[union-attr]


async def assert_nothing_left(served: Running) -> None:
    """No request, task, connection or count; the last answer may have overtaken its own clean-up by a moment."""
    async with asyncio.timeout(5):
        while served.gateway.in_flight or served.gateway._running or own_tasks():
            await asyncio.sleep(0.005)
    assert served.gateway.in_flight == 0
    assert not served.gateway._running
    assert own_tasks() == set()
    assert upstream_connections(served) == 0
    for view in served.policy.view.replicas:
        assert served.gateway.board.in_flight(view.replica) == 0


def head_of(served: Running, length: int = 99) -> bytes:
    """A request's head, for tests that write to the socket themselves."""
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {served.key}"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


async def stream_error(response: aiohttp.ClientResponse) -> dict[str, object]:
    """The error event a broken stream ends with."""
    body = await response.read()
    assert not body.endswith(DONE)
    last = body.rstrip(b"\n").rsplit(b"\n\n", 1)[-1]
    assert last.startswith(b"data: ")
    error: dict[str, object] = json.loads(last[6:])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_refused_connection_is_retried_on_another_replica(offline_settings: Settings) -> None:
    async with (
        fake_replica() as good,
        running_gateway(offline_settings, route(nobody(), "dead"), route(good, "good")) as served,
    ):
        for _ in range(8):
            async with served.post(CHAT) as response:
                assert response.status == 200
        assert len(good.seen) == 8
        total = served.total()
        assert (total.accepted, total.finished, total.failed) == (8, {"stop": 8}, {})
        # only the first draw of the dead one costs a retry: it is avoided until it reports again
        assert served.metric("upstream_failures_total", cause="upstream_unreachable", retried="yes") <= 1
        assert len({seen.headers["x-tidegate-attempt"] for seen in good.seen}) == 8


async def test_a_refused_replica_is_tried_again_after_its_next_report(offline_settings: Settings) -> None:
    dead = route(nobody(), "dead")
    async with fake_replica() as good, running_gateway(offline_settings, dead, route(good, "good")) as served:
        board = served.gateway.board
        board.suspect("dead")
        assert [c.suspect for c in board.candidates([dead])] == [True]
        report = ReplicaLoad(
            replica="dead", at=0.0, state=ReplicaState.READY, running=0, waiting=0, blocks_free=1, blocks_total=1
        )
        board.heard(report)
        assert [c.suspect for c in board.candidates([dead])] == [False]


async def test_nobody_reachable_is_503_with_retry_after(offline_settings: Settings) -> None:
    async with running_gateway(offline_settings, route(nobody(), "a"), route(nobody(), "b")) as served:
        async with served.post(STREAM) as response:
            assert response.status == 503
            assert response.headers["retry-after"]
            assert "upstream_unreachable" in response.headers["x-tidegate-reason"]
            assert (await response.json())["error"]["code"] == "upstream_unreachable"
        total = served.total()
        assert (total.accepted, total.failed) == (1, {"upstream_unreachable": 1})
        line = (await served.lines())[0]
        assert (line["outcome"], line["status"], line["error_code"]) == ("failed", 503, "upstream_unreachable")
        await assert_nothing_left(served)


async def test_a_reset_before_any_byte_is_retried_once_even_on_the_only_replica(offline_settings: Settings) -> None:
    async def reset_first(request: object, body: bytes) -> object:
        if len(replica.seen) == 1:
            return await replicas.reset(request, body)  # type: ignore[arg-type]
        return await replicas.answer(request, body)  # type: ignore[arg-type]

    async with fake_replica() as replica, running_gateway(offline_settings, route(replica, "only")) as served:
        replica.behave = reset_first  # type: ignore[assignment]
        async with served.post(CHAT) as response:
            assert response.status == 200
        assert len(replica.seen) == 2
        assert len({seen.headers["x-tidegate-attempt"] for seen in replica.seen}) == 2
        assert len({seen.headers["x-request-id"] for seen in replica.seen}) == 1
        replica.behave = replicas.reset
        async with served.post(CHAT) as response:
            assert response.status == 503
        assert len(replica.seen) == 4
        await assert_nothing_left(served)


async def test_f18_retries_are_at_most_a_tenth_of_the_traffic(offline_settings: Settings) -> None:
    async with (
        fake_replica(replicas.reset) as replica,
        running_gateway(offline_settings, route(replica, "only")) as served,
    ):
        for _ in range(100):
            async with served.post(CHAT) as response:
                assert response.status == 503
        retried = len(replica.seen) - 100
        assert 10 <= retried <= 10 + 100 / 10
        await assert_nothing_left(served)


async def test_a_replica_that_says_503_is_passed_over_for_another(offline_settings: Settings) -> None:
    async with (
        fake_replica(replicas.error(503, UNAVAILABLE)) as starting,
        fake_replica() as good,
        running_gateway(offline_settings, route(starting, "starting"), route(good, "good")) as served,
    ):
        for _ in range(6):
            async with served.post(STREAM) as response:
                assert response.status == 200
        assert len(good.seen) == 6
        assert len(starting.seen) <= 1
        await assert_nothing_left(served)


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_replica_that_never_answers_is_504_after_the_timeout(
    offline_settings: Settings, body: dict[str, object]
) -> None:
    settings = msgspec.structs.replace(offline_settings, upstream_timeout_s=0.2)
    async with fake_replica(replicas.hang) as replica, running_gateway(settings, route(replica, "r0")) as served:
        async with served.post(body) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "upstream_timeout"
        assert len(replica.seen) == 1  # a slow answer is never asked for twice
        assert served.total().failed == {"upstream_timeout": 1}
        await assert_nothing_left(served)


async def test_a_stream_that_stalls_ends_with_an_error_event(offline_settings: Settings) -> None:
    async def stall(request: object, body: bytes) -> object:
        response = await replicas.start_stream(request)  # type: ignore[arg-type]
        await response.write(event(chunk("a")))
        await asyncio.Event().wait()
        return response

    settings = msgspec.structs.replace(offline_settings, upstream_timeout_s=0.2)
    async with fake_replica(stall) as replica, running_gateway(settings, route(replica, "r0")) as served:  # type: ignore[arg-type]
        async with served.post(STREAM) as response:
            assert response.status == 200
            assert (await stream_error(response))["code"] == "upstream_timeout"
        await assert_nothing_left(served)


@pytest.mark.parametrize(
    ("pieces", "relayed"),
    [
        ([event(chunk("a")), event(chunk("b"))], event(chunk("a")) + event(chunk("b"))),
        ([event(chunk("a")), event(chunk("b"))[:20]], event(chunk("a"))),
        ([event(chunk("ü"))[:-5]], b""),
    ],
)
@pytest.mark.parametrize("clean", [True, False])
async def test_a_replica_that_dies_in_mid_stream_costs_an_error_event_and_a_closed_stream(
    offline_settings: Settings, pieces: list[bytes], relayed: bytes, clean: bool
) -> None:
    async with (
        fake_replica(parts(pieces, pause=0.02, end=clean)) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        async with served.post(STREAM) as response:
            assert response.status == 200
            body = await response.read()
        assert body.startswith(relayed)
        error = json.loads(body[len(relayed) :].removeprefix(b"data: "))["error"]
        assert error["code"] == ("upstream_truncated" if clean else "upstream_reset")
        assert len(replica.seen) == 1  # never retried after a byte was sent
        total = served.total()
        assert sum(total.failed.values()) == total.accepted == 1
        assert total.tpot is None
        await assert_nothing_left(served)


async def test_an_error_event_of_the_replica_is_relayed_and_counts_as_failed(offline_settings: Settings) -> None:
    failed = event({"error": {"message": "core died", "type": "server_error", "param": None, "code": "engine_error"}})
    async with (
        fake_replica(parts([event(chunk("a")), failed])) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        async with served.post(STREAM) as response:
            assert await response.read() == event(chunk("a")) + failed
        assert served.total().failed == {"upstream_error": 1}


async def test_a_whole_answer_cut_in_the_middle_is_502(offline_settings: Settings) -> None:
    async def cut(request: aiohttp.web.Request, body: bytes) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(headers={"content-length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id":')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with fake_replica(cut) as replica, running_gateway(offline_settings, route(replica, "r0")) as served:
        async with served.post(CHAT) as response:
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "upstream_truncated"
        assert len(replica.seen) == 1
        assert served.total().accepted == 1
        await assert_nothing_left(served)


@pytest.mark.parametrize("body", [b"<html>oops</html>", b""])
async def test_a_500_that_is_not_openais_shape_becomes_502(offline_settings: Settings, body: bytes) -> None:
    async def broken(request: aiohttp.web.Request, _: bytes) -> aiohttp.web.StreamResponse:
        return aiohttp.web.Response(status=500, body=body)

    async with (
        fake_replica(broken) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
        served.post(CHAT) as response,
    ):
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "upstream_error"


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


async def test_f37_many_streams_opened_and_left_leave_nothing(offline_settings: Settings, rng: random.Random) -> None:
    """300 streams, left at random moments: before headers, in mid-stream, at the end."""
    async with (
        fake_replica(replicas.stream_forever) as endless,
        fake_replica(parts([event(chunk("a")), event(usage_chunk()), DONE], pause=0.01)) as short,
        running_gateway(offline_settings, route(endless, "endless"), route(short, "short")) as served,
    ):

        async def visit(number: int) -> None:
            async with asyncio.timeout(rng.uniform(0.001, 0.15)):
                async with served.post(STREAM, headers={"connection": "close"} if number % 2 else {}) as response:
                    await response.content.read()

        before = len(asyncio.all_tasks())
        for start in range(0, 300, 30):
            await asyncio.gather(*(visit(i) for i in range(start, start + 30)), return_exceptions=True)
        async with asyncio.timeout(10):
            while served.gateway.in_flight or endless.active or short.active:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)
        await assert_nothing_left(served)
        assert len(asyncio.all_tasks()) <= before + 5
        total = served.total()
        ended = sum(total.finished.values()) + sum(total.failed.values()) + sum(total.refused.values())
        assert total.accepted == ended + total.cancelled > 0
        assert total.failed == {}


async def test_every_accepted_request_ends_in_exactly_one_outcome(
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
        assert total.accepted == len(lines)
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


def test_a_retry_is_possible_only_before_any_byte() -> None:
    assert exchange.RETRYABLE.isdisjoint({"upstream_timeout", "upstream_truncated", "upstream_error"})


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


def test_fake_replica_listens_where_it_says() -> None:
    assert FakeReplica(7, replicas.answer).url == "http://127.0.0.1:7"
