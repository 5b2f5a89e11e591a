"""What one client may ask of a server: HTTP/1.1 as it is, and nothing without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from controlplane.http.bounds import HEAD_BYTES, REST_BYTES
from tests.controlplane.http.conftest import GET, Serve

POST = b"POST /%s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
FLOOD = b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /%s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET / SPDY/9\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad name: 1\r\n\r\n",
        b"GET \xff\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_the_shape_of_every_error(serve: Serve, sent: bytes) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.code) == (400, "invalid_http")
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""


async def test_a_body_that_breaks_its_framing_is_refused_unless_an_answer_has_begun(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(CHUNKED % b"echo" + b"5\r\nhello\r\nnonsense\r\n")
        assert (await client.answer()).code == "invalid_http"
        assert await client.rest() == b""
        async with asyncio.timeout(5):
            await served.application.left.wait()
        client = await served.connect()
        client.send(CHUNKED % b"stream" + b"5\r\nhello\r\n")
        async with asyncio.timeout(5):
            await client.reader.readuntil(b"first\r\n")
        client.send(b"nonsense\r\n")
        assert await client.rest() == b""


async def test_a_head_that_does_not_end_is_refused_by_size_however_it_comes(serve: Serve) -> None:
    async with serve() as served:
        for line in (b"x-filler: " + b"y" * 1000 + b"\r\n", b"x: 1\r\n", b"y" * 1000):
            client = await served.connect()
            client.send(b"GET /small HTTP/1.1\r\n" + (b"x-long: " if b"\r" not in line else b""))
            with contextlib.suppress(ConnectionError):
                for _ in range(2 * HEAD_BYTES // len(line)):
                    client.send(line)
                    await client.writer.drain()
            answer = await client.answer()
            assert (answer.status, answer.code) == (431, "headers_too_large")


async def test_a_head_and_a_silent_connection_have_a_time_to_come(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.http.server.HEAD_S", 0.3)
    async with serve() as served:
        silent, slow, quick = [await served.connect() for _ in range(3)]
        slow.send(b"GET /small HTTP/1.1\r\nhost:")
        quick.send(GET)
        assert (await quick.answer()).body == b"/small"
        answer = await slow.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await silent.rest() == b""
        quick.send(GET)
        assert (await quick.answer()).body == b"/small"
        quick.send(b"GET /small")
        assert (await quick.answer()).code == "request_timeout"


async def test_a_connection_between_two_requests_is_closed_in_time_whatever_trickles_in(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.http.server.IDLE_S", 0.3)
    async with serve() as served:
        client = await served.connect()
        client.send(GET)
        await client.answer()
        trickle = asyncio.create_task(_trickle(client.writer))
        assert await client.rest() == b""
        trickle.cancel()


async def _trickle(writer: asyncio.StreamWriter) -> None:
    """Blank lines, which are no request."""
    while True:
        writer.write(b"\r\n")
        await asyncio.sleep(0.05)


async def test_a_request_under_way_has_no_such_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.http.server.IDLE_S", 0.1)
    monkeypatch.setattr("controlplane.http.server.HEAD_S", 0.1)
    async with serve() as served:
        client = await served.connect()
        client.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.5)
        served.application.go.set()
        assert (await client.answer()).body == b"/slow"


async def test_a_client_that_reads_nothing_of_its_answer_is_cut_off(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would hold a place, a lease and a replica's slot for as long as it likes."""
    monkeypatch.setattr("controlplane.http.server.STALLED_S", 0.3)
    async with serve() as served:
        client = await served.connect()
        client.writer.transport.pause_reading()
        client.send(FLOOD)
        async with asyncio.timeout(10):
            await served.application.left.wait()


async def test_a_client_that_reads_slowly_gets_its_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.http.server.STALLED_S", 0.3)
    async with serve() as served:
        client = await served.connect()
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.send(FLOOD)
        for _ in range(25):
            await asyncio.sleep(0.05)
            assert len(await client.reader.readexactly(1 << 20)) == 1 << 20
        assert not served.application.left.is_set()
        client.writer.close()
        async with asyncio.timeout(10):
            await served.application.left.wait()


async def test_connections_beyond_the_bound_are_told_so_and_places_come_free(serve: Serve) -> None:
    async with serve(most_connections=2) as served:
        first, second = await served.connect(), await served.connect()
        for client in (first, second):
            client.send(GET)
            assert (await client.answer()).status == 200
        third = await served.connect()
        answer = await third.answer()
        assert (answer.status, answer.code) == (503, "too_many_connections")
        assert await third.rest() == b""
        first.writer.close()
        await first.writer.wait_closed()
        async with asyncio.timeout(5):
            while True:
                again = await served.connect()
                again.send(GET)
                if (await again.answer()).status == 200:
                    break


async def test_the_rest_of_a_small_body_is_dropped_and_the_connection_goes_on(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(POST % (b"small", 1000) + b"half")
        assert (await client.answer()).body == b"/small"
        client.send(b"x" * 996 + GET)
        assert (await client.answer()).body == b"/small"


async def test_a_body_without_end_is_cut_off_after_its_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.http.server.HEAD_S", 0.5)
    async with serve() as served:
        client = await served.connect()
        client.send(POST % (b"small", 1 << 40))
        assert (await client.answer()).body == b"/small"
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.send(b"x" * REST_BYTES)
                await client.writer.drain()
        waiting = await served.connect()
        waiting.send(POST % (b"small", 10))
        await waiting.answer()
        assert await waiting.rest() == b""


async def test_requests_sent_ahead_are_answered_in_order(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(POST % (b"echo", 3) + b"one" + POST % (b"echo", 3) + b"two" + GET)
        assert [(await client.answer()).body for _ in range(3)] == [b"one", b"two", b"/small"]


async def test_a_wish_to_speak_something_else_gets_http(serve: Serve) -> None:
    async with serve() as served:
        for protocol in (b"websocket", b"h2c"):
            client = await served.connect()
            head = b"GET /small HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: %s\r\n\r\n"
            client.send(head % protocol)
            assert (await client.answer()).body == b"/small"


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(b"POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert (await client.answer()).status == 100
        client.send(b"ok")
        assert (await client.answer()).body == b"ok"


async def test_an_old_client_is_answered_and_hung_up_on(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(b"GET /small HTTP/1.0\r\n\r\n")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.rest() == b""


async def test_the_application_learns_at_once_that_its_client_left(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(b"GET /watch HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(5):
            await served.application.began.wait()
            client.writer.close()
            await served.application.left.wait()


async def test_a_large_body_is_read_whole_and_only_as_it_is_taken(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        body = bytes(range(256)) * 20_000
        client.send(POST % (b"echo", len(body)) + body)
        assert (await client.answer()).body == body
