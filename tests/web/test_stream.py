"""Event streams end cleanly whichever way they end: no task, slot, connection or subscription is left (F37)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from controlplane.console.live import Broadcaster
from controlplane.console.stream import EventStream
from controlplane.fleet.schemas import LOAD_CHANNEL
from controlplane.settings import Settings
from tests.controlplane.clients import Deployment, deployment, log_in
from tests.web.test_live import Source, a_broadcaster

SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "path": "/events/overview"}


class Browser:
    """The other end of one stream: collects what is sent, leaves when told."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.got = asyncio.Event()
        self._gone = asyncio.Event()
        self._asked = False

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if b"event:" in message.get("body", b""):
            self.got.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def yes() -> bool:
    return True


def stream(broadcaster: Broadcaster, allowed: Callable[[], Awaitable[bool]] = yes, **rest: float) -> EventStream:
    return EventStream(broadcaster, 300, allowed, **rest)


async def watched(application: Any, browser: Browser, scope: dict[str, Any] | None = None) -> asyncio.Task[None]:
    """The stream's task, once it has sent its first event."""
    task = asyncio.ensure_future(application(dict(scope or SCOPE), browser.receive, browser.send))
    async with asyncio.timeout(20):
        await browser.got.wait()
    return task


async def test_a_browser_that_leaves_ends_its_stream_at_once() -> None:
    broadcaster = a_broadcaster(Source())
    await broadcaster.snapshot(300)
    before = asyncio.all_tasks()
    browser = Browser()
    task = await watched(stream(broadcaster), browser)
    assert browser.messages[0]["status"] == 200
    assert broadcaster.watchers == 1
    browser.leave()
    async with asyncio.timeout(5):
        await task
    assert broadcaster.watchers == 0
    assert asyncio.all_tasks() == before


async def test_a_session_that_ended_ends_the_stream_and_says_so() -> None:
    source, broadcaster = Source(), a_broadcaster(Source())
    broadcaster._load = source
    await broadcaster.snapshot(300)
    alive = True

    async def allowed() -> bool:
        return alive

    browser = Browser()
    task = await watched(stream(broadcaster, allowed, session_check_s=0.0), browser)
    await broadcaster._refresh(300, broadcaster._topics[300])
    await asyncio.sleep(0)
    assert not task.done()
    alive = False
    await broadcaster._refresh(300, broadcaster._topics[300])
    async with asyncio.timeout(5):
        await task
    assert b"event: ended" in browser.body
    assert browser.messages[-1]["more_body"] is False
    assert broadcaster.watchers == 0


async def test_an_outage_of_the_session_store_ends_no_stream() -> None:
    broadcaster = a_broadcaster(Source())
    await broadcaster.snapshot(300)

    async def allowed() -> bool:
        raise ConnectionRefusedError("PostgreSQL is away")

    browser = Browser()
    task = await watched(stream(broadcaster, allowed, session_check_s=0.0), browser)
    await broadcaster._refresh(300, broadcaster._topics[300])
    await asyncio.sleep(0)
    assert not task.done()
    browser.leave()
    await task


async def test_a_browser_that_takes_nothing_is_given_up() -> None:
    broadcaster = a_broadcaster(Source())
    await broadcaster.snapshot(300)
    browser = Browser()

    async def stuck(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await stream(broadcaster, send_timeout_s=0.05)(dict(SCOPE), browser.receive, stuck)  # type: ignore[arg-type]
    assert broadcaster.watchers == 0


async def test_a_connection_that_breaks_while_sending_leaves_nothing() -> None:
    broadcaster = a_broadcaster(Source())
    await broadcaster.snapshot(300)
    before = asyncio.all_tasks()
    browser = Browser()

    async def broken(message: dict[str, Any]) -> None:
        raise ConnectionResetError

    await stream(broadcaster)(dict(SCOPE), browser.receive, broken)  # type: ignore[arg-type]
    assert broadcaster.watchers == 0
    assert asyncio.all_tasks() == before


async def test_stopping_the_process_ends_every_stream() -> None:
    broadcaster = a_broadcaster(Source())
    await broadcaster.snapshot(300)
    browsers = [Browser() for _ in range(20)]
    tasks = [await watched(stream(broadcaster), browser) for browser in browsers]
    broadcaster.close()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
    assert broadcaster.watchers == 0


async def open_and_close(deployed: Deployment, redis: Redis, cycles: int, together: int = 20) -> None:
    """The real application, `cycles` streams; what it holds afterwards is what it held before."""
    await log_in(deployed, deployed.operator_email)
    cookies = "; ".join(f"{name}={value}" for name, value in deployed.client.cookies.items())
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/events/overview",
        "raw_path": b"/events/overview",
        "query_string": b"window=300",
        "root_path": "",
        "headers": [(b"host", b"console.example"), (b"cookie", cookies.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("console.example", 80),
    }
    broadcaster: Broadcaster = deployed.app.state.console.broadcaster
    resources = deployed.app.state.resources

    async def wave() -> None:
        browsers = [Browser() for _ in range(together)]
        tasks = await asyncio.gather(
            *[watched(deployed.app, browser, {**scope, "headers": list(scope["headers"])}) for browser in browsers]  # type: ignore[call-overload]
        )
        assert broadcaster.watchers == together
        for browser in browsers:
            browser.leave()
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)

    await wave()
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    clients = len(await redis.client_list())
    subscriptions = (await redis.pubsub_numsub(LOAD_CHANNEL))[0][1]
    for _ in range(cycles // together):
        await wave()
    assert broadcaster.watchers == 0
    assert {task.get_name() for task in asyncio.all_tasks()} <= tasks
    assert len(await redis.client_list()) <= clients
    assert (await redis.pubsub_numsub(LOAD_CHANNEL))[0][1] == subscriptions == 1
    async with asyncio.timeout(10):  # the application's own reading, once a second, may hold one for a moment
        while resources.engine.pool.checkedout():
            await asyncio.sleep(0.01)


async def test_f37_hundreds_of_streams_opened_and_closed_leave_nothing(settings: Settings, redis: Redis) -> None:
    async with deployment(settings) as deployed:
        await open_and_close(deployed, redis, 300)


@pytest.mark.slow
async def test_f37_two_thousand_streams_opened_and_closed_leave_nothing(settings: Settings, redis: Redis) -> None:
    async with deployment(settings) as deployed:
        await open_and_close(deployed, redis, 2000)
