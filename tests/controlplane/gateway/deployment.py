"""The real gateway application on real stores, in this loop, and hands on the database it follows."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.app import Role, create_app
from controlplane.db import create_engine, transaction
from controlplane.fleet.service import ensure_pool, take_in
from controlplane.gateway.gateway import Gateway
from controlplane.http.server import HttpServer
from controlplane.settings import Settings
from controlplane.tenants.service import create_key, create_tenant
from dataplane.protocol import ReplicaState, Report
from tests.controlplane.gateway.harness import CHAT
from tests.services import loopback_socket


@dataclass
class Deployed:
    """A serving gateway and a client."""

    gateway: Gateway
    url: str
    client: aiohttp.ClientSession
    metrics_token: str

    async def status(self, key: str, **changes: object) -> tuple[int, str]:
        """Status and error code ("" when served) of one request."""
        body = json.dumps({**CHAT, **changes})
        headers = {"authorization": f"Bearer {key}"}
        async with self.client.post(self.url + "/v1/chat/completions", data=body, headers=headers) as response:
            answer = await response.json()
            return response.status, str(answer["error"]["code"]) if "error" in answer else ""

    async def metrics(self) -> str:
        headers = {"authorization": f"Bearer {self.metrics_token}"}
        async with self.client.get(self.url + "/metrics", headers=headers) as response:
            assert response.status == 200
            return await response.text()


@asynccontextmanager
async def deployed_gateway(settings: Settings) -> AsyncIterator[Deployed]:
    """The application of `create_app`, with its lifespan and background work, on a free port."""
    app = create_app(Role.GATEWAY, settings)
    listening = loopback_socket()
    port = listening.getsockname()[1]
    server = HttpServer(app, listening)
    serving = asyncio.create_task(server.serve())
    client = aiohttp.ClientSession()
    url = f"http://127.0.0.1:{port}"
    try:
        await reachable(client, url)
        yield Deployed(app.state.gateway, url, client, settings.internal_token.reveal())
    finally:
        await client.close()
        server.stop()
        async with asyncio.timeout(20):
            await serving


async def reachable(client: aiohttp.ClientSession, url: str) -> None:
    """Wait until /healthz answers."""
    async with asyncio.timeout(30):
        while True:
            try:
                async with client.get(url + "/healthz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Accounts:
    """What operators do, straight on the database."""

    def __init__(self, settings: Settings) -> None:
        self.engine: AsyncEngine = create_engine(settings, pooled=False)
        self._sequence = 0

    async def tenant(self, slug: str) -> None:
        async with transaction(self.engine) as session:
            await create_tenant(session, slug=slug, name=slug)

    async def key(self, slug: str) -> str:
        async with transaction(self.engine) as session:
            return (await create_key(session, tenant_slug=slug, name="test")).plain.reveal()

    async def pool(self, name: str, model: str) -> None:
        async with transaction(self.engine) as session:
            await ensure_pool(session, name, model)

    async def replica(self, name: str, pool: str, url: str, state: ReplicaState = ReplicaState.READY) -> None:
        """What a replica's report does, and what silence would conclude from it."""
        self._sequence += 1
        now = time.time()
        report = Report(
            replica=name,
            pool=pool,
            model="m",
            url=url,
            boot_epoch=1,
            core_epoch=1,
            sequence=self._sequence,
            acknowledged=0,
            sent_at=now,
            started_at=now,
            state=ReplicaState.READY,
        )
        async with transaction(self.engine) as session:
            await take_in(session, [report], now)
            await session.execute(
                text("UPDATE replicas SET state = :state WHERE id = :id"), {"id": name, "state": state.value}
            )

    async def close(self) -> None:
        await self.engine.dispose()
