"""A fake engine with a service time: `python -m controlplane.lab.bench.batching_engine`.

Layer: service. Continuous batching as arithmetic: a step decodes one token of every running request and prefills the
oldest prompts within its budget, and takes as long as its tokens say; what finds no slot waits in the order of arrival,
like an engine that knows no tenants. It computes nothing and listens on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from typing import NamedTuple

import click
import msgspec
import uvloop
from aiohttp import web

from controlplane.lab.bench import wire
from controlplane.lab.bench.engine_report import EngineReporter, Identity, UsageBook

HOST = "127.0.0.1"
MAX_BODY = 8 * 1024 * 1024
WORD = b"tide"
"""A prompt has as many tokens as it has of this word."""


class Speed(NamedTuple):
    """Of one replica: seconds of a step and of each prompt token in it; prompt tokens of a step; requests at once."""

    step_s: float
    token_s: float
    budget: int
    slots: int


class _Running:
    __slots__ = ("done", "left", "news", "prompt")

    def __init__(self, prompt: int, output: int) -> None:
        self.prompt = prompt
        self.left = output
        self.news: asyncio.Queue[bool] = asyncio.Queue()
        self.done = False


class Batcher:
    """One replica's steps; `run` ends only by cancellation."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.running: list[_Running] = []
        self.waiting: deque[_Running] = deque()
        self._wanted = asyncio.Event()

    def add(self, prompt: int, output: int) -> _Running:
        request = _Running(prompt, output)
        self.waiting.append(request)
        self._wanted.set()
        return request

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            if not self._refill():
                self._wanted.clear()
                await self._wanted.wait()
                at = loop.time()
                continue
            decoding = [each for each in self.running if not each.prompt]
            prefilled = self._prefill()
            at = max(at, loop.time() - self.speed.step_s) + self.speed.step_s + prefilled * self.speed.token_s
            await asyncio.sleep(max(0.0, at - loop.time()))
            for each in decoding:
                each.left -= 1
                each.news.put_nowait(each.left <= 0)
                each.done = each.left <= 0

    def _refill(self) -> bool:
        self.running = [each for each in self.running if not each.done]
        while self.waiting and len(self.running) < self.speed.slots:
            request = self.waiting.popleft()
            if not request.done:
                self.running.append(request)
        return bool(self.running)

    def _prefill(self) -> int:
        left = self.speed.budget
        for each in self.running:
            chunk = min(left, each.prompt)
            each.prompt -= chunk
            left -= chunk
        return self.speed.budget - left


class Replica:
    """One replica's HTTP side. Answers are streams."""

    def __init__(self, model: str, speed: Speed) -> None:
        self.batcher = Batcher(speed)
        self._answers = wire.Answers(model)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            ask = wire.read_ask(body)
        except msgspec.DecodeError as problem:
            return web.json_response({"error": {"message": str(problem), "code": "invalid_json"}}, status=400)
        prompt = max(1, body.count(WORD))
        running = self.batcher.add(prompt, max(1, ask.max_tokens))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            await response.write(_event(self._answers.opening))
            while not await running.news.get():
                await response.write(_event(self._answers.tokens[0]))
            usage = wire.usage(ask.max_tokens) | {"prompt_tokens": prompt, "total_tokens": prompt + ask.max_tokens}
            last = (self._answers.tokens[0], self._answers.closing, self._answers.usage_of(usage), self._answers.done)
            await response.write(b"".join(_event(part) for part in last))
        finally:
            running.done = True
        return response

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/healthz", _health)
        return app


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def _event(chunk: bytes) -> bytes:
    """The event in a chunk of a chunked body, which the server makes anew."""
    return chunk.split(b"\r\n", 1)[1][:-2]


async def serve(ports: list[int], who: Identity, speed: Speed, *, control_url: str, token: str) -> None:
    """One replica on each port, until cancelled."""
    work: list[asyncio.Task[None]] = []
    runners: list[web.AppRunner] = []
    try:
        for number, port in enumerate(ports):
            name = msgspec.structs.replace(who, replica=f"{who.pool}-{number}", url=f"http://{HOST}:{port}")
            replica = Replica(who.model, speed)
            runner = web.AppRunner(replica.application(), handler_cancellation=True, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, HOST, port).start()
            runners.append(runner)
            work.append(asyncio.create_task(replica.batcher.run()))
            if control_url:
                reporter = EngineReporter(name, UsageBook(name), control_url, token)
                work.append(asyncio.create_task(reporter.run()))
        await asyncio.gather(*work)
    finally:
        for task in work:
            task.cancel()
        for runner in runners:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await runner.cleanup()


@click.command()
@click.option("--port", "ports", type=click.IntRange(1, 65535), multiple=True, required=True, help="One per replica.")
@click.option("--model", required=True)
@click.option("--pool", required=True)
@click.option("--control-url", default="")
@click.option("--step-ms", type=float, default=40.0)
@click.option("--token-us", type=float, default=40.0)
@click.option("--budget", type=int, default=512)
@click.option("--slots", type=int, default=4)
def main(
    *,
    ports: tuple[int, ...],
    model: str,
    pool: str,
    control_url: str,
    step_ms: float,
    token_us: float,
    budget: int,
    slots: int,
) -> None:
    """Serve made-up streams at a made-up speed until SIGTERM; TIDEGATE_INTERNAL_TOKEN opens the control plane."""
    speed = Speed(step_ms / 1000, token_us / 1e6, budget, slots)
    token = os.environ.get("TIDEGATE_INTERNAL_TOKEN", "")
    who = Identity(replica=pool, pool=pool, model=model, url="")
    uvloop.run(serve(list(ports), who, speed, control_url=control_url, token=token))


if __name__ == "__main__":
    main()
