"""/healthz: this process is alive, and whether it reaches its stores.

Layer: service. Answers 200 as long as the process turns: an outage of Postgres or Redis is a declared mode, not a
reason to restart. Never says more than "ok" or "away" to strangers, and asks the stores at most once a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from litestar import get
from litestar.di import NamedDependency
from sqlalchemy import text

from controlplane.component import Resources

PROBE_TIMEOUT_S = 1.0
FRESH_S = 1.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`postgres` and `redis` are "ok" or "away"."""

    status: str
    role: str
    postgres: str
    redis: str


class StoreProbe:
    """Asks one store by `ask`, one question at a time. It never waits for longer than `PROBE_TIMEOUT_S`, not even for a
    question to be given up: a driver whose server is frozen takes its time for that.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._given_up = False

    async def word(self) -> str:
        """ "ok", or "away" when the store has not answered, or not the question before this one."""
        if self._asking is None or self._asking.done():
            self._asking, self._given_up = asyncio.create_task(self._ask()), False
        if self._given_up:
            return "away"
        asking = self._asking
        done, _ = await asyncio.wait({asking}, timeout=PROBE_TIMEOUT_S)
        if not done:
            self._given_up = asking.cancel()
            asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return "away"
        return "ok" if asking.exception() is None else "away"  # whatever the driver raises, the store is not there


class HealthProbe:
    """One process's probe; concurrent callers share one look."""

    def __init__(self, resources: Resources, role: str) -> None:
        self._resources = resources
        self._role = role
        self._lock = asyncio.Lock()
        self._postgres, self._redis = StoreProbe(self._ask_postgres), StoreProbe(self._ask_redis)
        self._seen: Health | None = None
        self._seen_at = 0.0

    async def look(self) -> Health:
        async with self._lock:
            if self._seen is None or time.monotonic() - self._seen_at > FRESH_S:
                postgres, redis = await asyncio.gather(self._postgres.word(), self._redis.word())
                self._seen = Health(status="ok", role=self._role, postgres=postgres, redis=redis)
                self._seen_at = time.monotonic()
            return self._seen

    async def _ask_postgres(self) -> None:
        async with self._resources.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def _ask_redis(self) -> None:
        await self._resources.redis.ping()


@get("/healthz", tags=["process"], operation_id="health", summary="Is this process alive?")
async def healthz(health: NamedDependency[HealthProbe]) -> Health:
    return await health.look()
