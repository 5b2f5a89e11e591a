"""A replica that keeps its own account: what it produced, told to a control plane until that has acknowledged it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import aiohttp
import msgspec
from aiohttp import web

from dataplane.protocol import (
    HEADER_ATTEMPT,
    HEADER_KEY,
    HEADER_PROJECT,
    HEADER_REQUEST,
    HEADER_TENANT,
    ReplicaState,
    Report,
    ReportAck,
    UsageBasis,
    UsageRecord,
    encode,
)
from tests.controlplane.gateway.replicas import DONE, chunk, event, usage_chunk
from tests.services import free_port

PER_REPORT = 20
INTERVAL_S = 0.1
TOKEN_S = 0.004


class TellingReplica:
    """`produced` is the truth: attempt id → what it used. What is in `silent` is never told."""

    def __init__(self, rng: random.Random, name: str = "r0", pool: str = "pool-m") -> None:
        self.name, self.pool = name, pool
        self.port = free_port()
        self.control = ""
        self.token = ""
        self.produced: dict[str, UsageRecord] = {}
        self.silent: set[str] = set()
        self.hides = False
        """Whether attempts that end now are never told."""
        self.active = 0
        self._waiting: dict[str, UsageRecord] = {}
        self._rng = rng
        self._boot = int(time.time() * 1000)
        self._sequence = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        prompt, tokens = self._rng.randint(5, 60), self._rng.randint(1, 40)
        began, made, finish = time.time(), 0, "abort"
        self.active += 1
        try:
            if not body.get("stream"):
                made, finish = tokens, "stop"
                answer = {"object": "chat.completion", "usage": _usage(prompt, made)}
                message = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
                return web.json_response({**answer, "choices": [message]})
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            while made < tokens:
                made += 1
                await response.write(event(chunk("x")))
                await asyncio.sleep(TOKEN_S)
            finish = "stop"
            for piece in (event(chunk(finish="stop")), event(usage_chunk(_usage(prompt, made))), DONE):
                await response.write(piece)
            return response
        finally:
            self.active -= 1
            self._keep(request, began, prompt, made, finish)

    def _keep(self, request: web.Request, began: float, prompt: int, made: int, finish: str) -> None:
        named = {name: request.headers.get(header, "") for name, header in _NAMED.items()}
        record = UsageRecord(
            **named,
            pool=self.pool,
            model="m",
            replica=self.name,
            started_at=began,
            finished_at=max(began, time.time()),
            finish=finish,
            basis=UsageBasis.ENGINE,
            prompt_tokens=prompt,
            cached_tokens=prompt // 4,
            output_tokens=made,
            device_seconds=made / 1000,
            boot_epoch=self._boot,
        )
        assert record.attempt_id not in self.produced
        self.produced[record.attempt_id] = record
        if self.hides:
            self.silent.add(record.attempt_id)
        else:
            self._waiting[record.attempt_id] = record

    async def tell(self) -> None:
        """Report until cancelled; what was not acknowledged is told again."""
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/msgpack"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                    await self._report(session)
                await asyncio.sleep(INTERVAL_S)

    async def _report(self, session: aiohttp.ClientSession) -> None:
        usage, now = list(islice(self._waiting.values(), PER_REPORT)), time.time()
        report = Report(
            replica=self.name,
            pool=self.pool,
            model="m",
            url=self.url,
            boot_epoch=self._boot,
            core_epoch=1,
            sequence=next(self._sequence),
            acknowledged=0,
            full=True,
            sent_at=now,
            started_at=self._boot / 1000,
            state=ReplicaState.READY,
            usage=usage,
            usage_left=len(self._waiting) - len(usage),
        )
        async with session.post(f"{self.control}/internal/v1/reports", data=encode(report)) as answer:
            if answer.status == 200:
                ack = msgspec.msgpack.decode(await answer.read(), type=ReportAck)
                for attempt in ack.usage_ids:
                    self._waiting.pop(attempt, None)


_NAMED = {
    "attempt_id": HEADER_ATTEMPT,
    "request_id": HEADER_REQUEST,
    "tenant": HEADER_TENANT,
    "project": HEADER_PROJECT,
    "key_id": HEADER_KEY,
}


def _usage(prompt: int, made: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": prompt // 4},
    }


@asynccontextmanager
async def telling_replica(rng: random.Random) -> AsyncIterator[TellingReplica]:
    replica = TellingReplica(rng)
    app = web.Application()
    app.router.add_post("/{path:.*}", replica.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", replica.port).start()
    try:
        yield replica
    finally:
        await runner.cleanup()
