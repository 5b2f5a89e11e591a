"""A server that starts, tells the date, and stops without losing what is under way."""

from __future__ import annotations

import asyncio
import os
import signal
from email.utils import parsedate_to_datetime

import pytest

from controlplane.http.server import HttpServer, StartError
from tests.controlplane.http.conftest import GET, Application, Serve
from tests.services import loopback_socket

SLOW = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_every_answer_has_a_date_and_names_no_server(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(GET)
        headers = (await client.answer()).headers
        assert parsedate_to_datetime(headers["date"]).tzinfo is not None
        assert "server" not in headers


async def test_a_stop_lets_requests_end_and_closes_what_is_idle(serve: Serve) -> None:
    async with serve() as served:
        idle, busy = await served.connect(), await served.connect()
        idle.send(GET)
        await idle.answer()
        busy.send(SLOW)
        async with asyncio.timeout(5):
            await served.application.began.wait()
            served.server.stop()
            assert await idle.rest() == b""
            with pytest.raises(ConnectionError):
                await served.connect()
            assert not served.serving.done()
            assert not served.application.ended, "the application is there while requests are"
            served.application.go.set()
            answer = await busy.answer()
            await served.serving
        assert (answer.body, answer.headers["connection"]) == (b"/slow", "close")
        assert await busy.rest() == b""
        assert served.application.ended


async def test_a_request_sent_ahead_is_answered_before_a_stop_ends_its_connection(serve: Serve) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(SLOW + GET)
        async with asyncio.timeout(5):
            await served.application.began.wait()
        served.server.stop()
        await asyncio.sleep(0)
        served.application.go.set()
        assert (await client.answer()).body == b"/slow"
        async with asyncio.timeout(5):
            await served.serving


@pytest.mark.parametrize("path", [b"slow", b"endless"])
async def test_a_stop_waits_for_nobody_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    """Neither for an application that does not end nor for a client that does not read."""
    monkeypatch.setattr("controlplane.http.server.STOP_S", 0.3)
    async with serve() as served:
        client = await served.connect()
        client.send(b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n" % path)
        async with asyncio.timeout(5):
            await served.application.began.wait()
            served.server.stop()
            await served.serving
        assert served.application.ended


async def test_a_signal_stops_it_and_the_handlers_before_are_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    application = Application()
    serving = asyncio.create_task(HttpServer(application, loopback_socket()).serve((signal.SIGTERM,)))
    while signal.getsignal(signal.SIGTERM) is before:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        await serving
    assert application.ended
    assert signal.getsignal(signal.SIGTERM) is before


async def test_an_application_that_cannot_start_is_said_and_nothing_listens() -> None:
    listening = loopback_socket()
    port = listening.getsockname()[1]
    with pytest.raises(StartError):
        await HttpServer(Application(refuses_to_start=True), listening).serve()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_nothing_of_a_connection_stays_when_it_is_gone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def kept(most: int) -> object:
        states.append(made(most))
        return states[-1]

    from controlplane.http import server

    made = server.Connections
    monkeypatch.setattr(server, "Connections", kept)
    async with serve() as served:
        for data in (b"", b"GET /sma", GET, b"nonsense\r\n\r\n"):
            client = await served.connect()
            client.send(data)
            await client.writer.drain()
            if data == GET:
                await client.answer()
            client.writer.close()
            await client.writer.wait_closed()
        (state,) = states
        async with asyncio.timeout(5):
            while state.connections or state.tasks:
                await asyncio.sleep(0.01)
        assert (len(state.head_alarms), len(state.idle_alarms)) == (0, 0)
