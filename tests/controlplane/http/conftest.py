"""A server of the control plane around a small application, and clients that speak bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from controlplane.http.server import HttpServer
from tests.services import loopback_socket

Message = MutableMapping[str, Any]
GET = b"GET /small HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass
class Application:
    """Answers by path: /small without reading, /echo with the body, /slow once `go` is set, /stream until told, /flood
    until its client leaves.
    """

    go: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    refuses_to_start: bool = False

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await receive()
            if self.refuses_to_start:
                await send({"type": "lifespan.startup.failed", "message": "no store"})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.ended = True
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, path = b"", scope["path"]
        if path == "/echo":
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.left.set()
                    return
                body, more = body + message["body"], message["more_body"]
        if path != "/small":
            self.began.set()
        if path == "/slow":
            await self.go.wait()
        if path == "/watch":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        if path == "/flood":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            gone = asyncio.ensure_future(receive())  # the request's end; only the next one is the client's
            await gone
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            self.left.set()
            return
        if path in {"/stream", "/endless"}:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            while path == "/endless":
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await self.go.wait()
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
            return
        answer = body or scope["path"].encode()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer, "more_body": False})


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of an error in the shape of every error here."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["code"])


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        """The next one on this connection, whose length it says."""
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            status = int(first.split()[1])
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    async def rest(self) -> bytes:
        """What comes until the server hangs up."""
        async with asyncio.timeout(10):
            return await self.reader.read()


@dataclass
class Served:
    application: Application
    server: HttpServer
    port: int
    serving: asyncio.Task[None]
    stack: AsyncExitStack

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.stack.callback(writer.close)
        return Client(reader, writer)


Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Serve:
    @asynccontextmanager
    async def served(**options: Any) -> AsyncIterator[Served]:
        listening = loopback_socket()
        port = listening.getsockname()[1]
        application = Application()
        server = HttpServer(application, listening, **options)
        serving = asyncio.create_task(server.serve())
        async with AsyncExitStack() as stack:
            served = Served(application, server, port, serving, stack)
            async with asyncio.timeout(10):
                while True:
                    try:
                        probe = await served.connect()
                        break
                    except ConnectionRefusedError:
                        await asyncio.sleep(0.01)
                probe.writer.close()
                await probe.writer.wait_closed()
            yield served
            application.go.set()
            server.stop()
            async with asyncio.timeout(10):
                await serving

    return served
