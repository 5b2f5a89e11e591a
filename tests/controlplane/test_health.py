"""/healthz while a store is there and silent."""

from __future__ import annotations

import asyncio
import signal

import psutil
from msgspec import structs
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from controlplane.component import Resources
from controlplane.db import create_engine
from controlplane.health import FRESH_S, HealthProbe
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.redis_client import create_redis
from controlplane.settings import Secret, Settings
from tests.services import free_port, service_folder

GUARD_S = 3.0
"""Below what a driver takes to give a question up when its server is frozen; far above the probe's second."""


async def test_f15_a_frozen_postgres_is_away_and_the_process_goes_on_to_answer(settings: Settings) -> None:
    with service_folder("health") as folder:
        server = EmbeddedPostgres(folder / "data", free_port())
        server.start()
        own = structs.replace(settings, database_url=Secret(server.url))
        engine, redis = create_engine(own), create_redis(own.redis_url)
        resources = Resources(settings=own, engine=engine, redis=redis, registry=CollectorRegistry())
        probe = HealthProbe(resources, "gateway")
        try:
            assert (await probe.look()).postgres == "ok"
            async with engine.connect() as held:
                await held.execute(text("SELECT 1"))
            assert server.child is not None
            postmaster = psutil.Process(server.child.pid)
            frozen = [postmaster, *postmaster.children(recursive=True)]
            for process in frozen:
                process.send_signal(signal.SIGSTOP)
            try:
                for _ in range(3):
                    await asyncio.sleep(FRESH_S)
                    async with asyncio.timeout(GUARD_S):
                        seen = await probe.look()
                    assert (seen.status, seen.postgres, seen.redis) == ("ok", "away", "ok")
            finally:
                for process in frozen:
                    process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(30):
                while (await probe.look()).postgres != "ok":
                    await asyncio.sleep(FRESH_S)
        finally:
            await engine.dispose()
            await redis.aclose()
            server.stop()
