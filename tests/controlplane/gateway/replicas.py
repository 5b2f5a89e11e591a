"""A replica for tests: speaks the engine's HTTP side and does whatever a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from dataplane.protocol import COUNT_SUFFIX
from tests.services import free_port

Behave = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]

USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def chunk(text: str | None = None, *, finish: str | None = None, role: str | None = None) -> dict[str, object]:
    """One streamed chat chunk."""
    delta: dict[str, object] = {}
    if role is not None:
        delta["role"] = role
    if text is not None:
        delta["content"] = text
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def usage_chunk(usage: dict[str, object] | None = None) -> dict[str, object]:
    return {**chunk(), "choices": [], "usage": usage or USAGE}


def event(data: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"

ANSWER = [chunk("", role="assistant"), chunk("Hél"), chunk("lo "), chunk("🦀"), chunk(finish="stop")]

COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Héllo 🦀"}, "finish_reason": "stop"}],
    "usage": USAGE,
}


@dataclass
class Seen:
    """One request as the replica got it."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FakeReplica:
    """`behave` answers; `seen` lists the requests; `gone` counts clients that left; `active` those being answered.

    `tokens` is what it counts in any prompt, None for an engine that does not count; `counted` lists who asked for it.
    """

    port: int
    behave: Behave
    seen: list[Seen] = field(default_factory=list)
    tokens: int | None = None
    counted: list[Seen] = field(default_factory=list)
    gone: int = 0
    active: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        if request.path.endswith(COUNT_SUFFIX):
            self.counted.append(Seen(request.path, headers, body))
            if self.tokens is None:
                return web.json_response({}, status=404)
            return web.json_response({"prompt_tokens": self.tokens, "prompts": 1})
        self.seen.append(Seen(request.path, headers, body))
        self.active += 1
        try:
            return await self.behave(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            self.left.set()
            raise
        finally:
            self.active -= 1


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-tidegate-replica": "inside"})
    await response.prepare(request)
    return response


def parts(pieces: list[bytes], *, pause: float = 0.0, end: bool = True) -> Behave:
    """Stream these writes, `pause` seconds apart; without `end` the connection is cut after the last."""

    async def behave(request: web.Request, body: bytes) -> web.StreamResponse:
        response = await start_stream(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause)
        if not end:
            assert request.transport is not None
            request.transport.abort()
        return response

    return behave


async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer as a replica would: streamed or not, usage only when asked for."""
    wanted = json.loads(body)
    if not wanted.get("stream"):
        return web.json_response(COMPLETION, headers={"x-tidegate-replica": "inside"})
    pieces = [event(data) for data in ANSWER]
    if (wanted.get("stream_options") or {}).get("include_usage"):
        pieces.append(event(usage_chunk()))
    return await parts([*pieces, DONE])(request, body)


def error(status: int, body: object, headers: dict[str, str] | None = None) -> Behave:
    async def behave(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return behave


async def hang(request: web.Request, body: bytes) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def stream_forever(request: web.Request, body: bytes) -> web.StreamResponse:
    """A token every few milliseconds until the client leaves."""
    response = await start_stream(request)
    while True:
        await response.write(event(chunk("x")))
        await asyncio.sleep(0.005)


async def reset(request: web.Request, body: bytes) -> web.StreamResponse:
    """Drop the connection before any byte of an answer."""
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


@asynccontextmanager
async def fake_replica(behave: Behave = answer, *, port: int | None = None) -> AsyncIterator[FakeReplica]:
    """A running replica on a free port."""
    replica = FakeReplica(port or free_port(), behave)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", replica.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", replica.port).start()
    try:
        yield replica
    finally:
        await runner.cleanup()
