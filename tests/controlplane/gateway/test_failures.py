"""Replicas that refuse, reset, hang or die: the client is told at once and nothing is left behind."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import msgspec
import pytest

from controlplane.fleet.schemas import ReplicaLoad
from controlplane.settings import Settings
from dataplane.protocol import ReplicaState
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import (
    CHAT,
    STREAM,
    assert_nothing_left,
    route,
    running_gateway,
    stream_error,
)
from tests.controlplane.gateway.replicas import chunk, event, fake_replica, parts
from tests.services import free_port

UNAVAILABLE = {"error": {"message": "starting", "type": "server_error", "param": None, "code": "core_starting"}}


def nobody() -> str:
    """An address where nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


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


async def test_f11_a_503_that_no_retry_is_left_for_says_what_its_replica_said(offline_settings: Settings) -> None:
    busy = replicas.error(503, UNAVAILABLE, {"retry-after": "7"})
    async with (
        fake_replica(busy) as one,
        fake_replica(busy) as other,
        running_gateway(offline_settings, route(one, "r0"), route(other, "r1")) as served,
    ):
        while served.gateway.retries.spend():
            pass
        async with served.post(CHAT) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "7"
            assert await response.json() == UNAVAILABLE
        assert len(one.seen) + len(other.seen) == 1
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


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        ("server_error", "engine_error", "upstream_error"),
        ("invalid_request_error", "constraint_unsatisfiable", "constraint_unsatisfiable"),
        ("invalid_request_error", "a_code_of_its_own", "upstream_error"),
        ("server_error", "constraint_unsatisfiable", "upstream_error"),
    ],
)
async def test_an_error_event_is_relayed_and_counts_as_failed_by_whose_fault_it_was(
    offline_settings: Settings, kind: str, code: str, reason: str
) -> None:
    failed = event({"error": {"message": "no more", "type": kind, "param": None, "code": code}})
    async with (
        fake_replica(parts([event(chunk("a")), failed])) as replica,
        running_gateway(offline_settings, route(replica, "r0")) as served,
    ):
        async with served.post(STREAM) as response:
            assert await response.read() == event(chunk("a")) + failed
        assert served.total().failed == {reason: 1}


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
