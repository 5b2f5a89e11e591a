"""A relay without any logic, the control of the gateway's bench: `python -m controlplane.lab.bench.plain_relay`.

Layer: service. The usual parts of a relay (granian, uvloop, one worker, ASGI, aiohttp) and nothing else: it
reads a body, posts it to the fake engine and passes the answer on, a stream as its chunks come. It knows no keys,
limits, routes or usage and must never stand before anything but a bench's engine: it listens on loopback only.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import click

from controlplane.lab.bench.engine import HOST, MAX_BODY
from controlplane.lab.bench.requests import PATH
from controlplane.local.child import Child, spawn
from controlplane.parent import die_with

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

NAME = "plain relay"
MAX_CONNECTIONS = 1024
TOTAL_S = 60.0
"""Longest time one request may take."""
BACKLOG = 2048


class PlainRelay:
    """The ASGI application. `url` is where every request is posted."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._relay(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=TOTAL_S),
            auto_decompress=False,
        )
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _relay(self, receive: Receive, send: Send) -> None:
        assert self._session is not None
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MAX_BODY:
                await _refuse(send, 413, f"The plain relay: the body is larger than {MAX_BODY} bytes.")
                return
        try:
            async with self._session.post(self._url, data=body, headers={"content-type": "application/json"}) as answer:
                await (_stream(answer, receive, send) if answer.content_length is None else _whole(answer, send))
        except aiohttp.ClientConnectorError:
            await _refuse(send, 502, f"The plain relay: {self._url} cannot be reached.")


async def _whole(answer: aiohttp.ClientResponse, send: Send) -> None:
    await _reply(send, answer.status, _type(answer), await answer.read())


async def _stream(answer: aiohttp.ClientResponse, receive: Receive, send: Send) -> None:
    """Pass chunks on until the answer ends or the client goes; the engine is left as soon as the client has gone."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.close()

    leaving = asyncio.create_task(leave())
    headers = [(b"content-type", _type(answer))]
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        async for chunk in answer.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except aiohttp.ClientConnectionError:
        if not leaving.done():
            raise  # the engine broke off: the server closes the connection, so the client sees it too
    finally:
        leaving.cancel()


async def _refuse(send: Send, status: int, why: str) -> None:
    await _reply(send, status, b"text/plain", why.encode())


async def _reply(send: Send, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _type(answer: aiohttp.ClientResponse) -> bytes:
    return answer.headers.get("content-type", "").encode()


def start(port: int, engine_port: int, *, log: Path, cwd: Path) -> Child:
    """Start the relay as a child process that ends with its parent. Raises OSError when it cannot be forked."""
    command = [sys.executable, "-P", "-m", "controlplane.lab.bench.plain_relay"]
    command += ["--port", str(port), "--engine-port", str(engine_port)]
    return spawn(NAME, command, log=log, environment=os.environ, cwd=cwd)


def load_application(url: str) -> PlainRelay:
    """Runs in granian's worker: tie its life to the parent's, then build the application."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)
    return PlainRelay(url)


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--engine-port", type=click.IntRange(1, 65535), required=True, help="Where the fake engine listens.")
def main(port: int, engine_port: int) -> None:
    """Relay to the fake engine, on loopback, until SIGTERM."""
    from granian import Granian
    from granian.constants import HTTPModes, Interfaces, Loops

    Granian(
        f"http://{HOST}:{engine_port}{PATH}",
        address=HOST,
        port=port,
        interface=Interfaces.ASGI,
        workers=1,
        loop=Loops.uvloop,
        http=HTTPModes.http1,
        websockets=False,
        backlog=BACKLOG,
        log_access=False,
    ).serve(target_loader=load_application, wrap_loader=True)


if __name__ == "__main__":
    main()
