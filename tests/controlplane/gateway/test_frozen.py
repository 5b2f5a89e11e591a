"""A Postgres that hangs, with every connection to it open: gateways go on serving whom they know."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from controlplane.local.postgres import EmbeddedPostgres
from controlplane.migrate import upgrade
from controlplane.settings import Secret, Settings
from tests.controlplane.gateway.deployment import deployed_gateway, until
from tests.controlplane.gateway.replicas import fake_replica
from tests.controlplane.gateway.test_enforcement import DEADLINE_MS, RPM, SERVED, Operator
from tests.services import free_port, service_folder


@contextmanager
def frozen(data: Path) -> Iterator[None]:
    """Postgres and all its processes stand still."""
    server = psutil.Process(int((data / "postmaster.pid").read_text().splitlines()[0]))
    stopped = [server.pid]
    os.kill(server.pid, signal.SIGSTOP)
    for child in server.children(recursive=True):
        os.kill(child.pid, signal.SIGSTOP)
        stopped.append(child.pid)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
async def test_f15_while_postgres_hangs_known_keys_go_on_and_the_store_is_never_called_away(settings: Settings) -> None:
    with service_folder("frozen") as folder:
        server = EmbeddedPostgres(folder / "data", free_port(), options={"fsync": "off"})
        server.start()
        try:
            upgrade(Secret(server.url))
            own = structs.replace(settings, database_url=Secret(server.url), lease_deadline_ms=DEADLINE_MS)
            operator = Operator(own)
            await operator.pool("pool-m", "m")
            key = await operator.limited_key("known", RPM, 1_000_000)
            async with fake_replica() as replica:
                await operator.replica("r0", "pool-m", replica.url)
                async with deployed_gateway(own) as gateway:
                    assert await gateway.status(key) == SERVED
                    await until(lambda: gateway.gateway.fleet.listening)
                    answers: Counter[tuple[int, str]] = Counter()
                    with frozen(folder / "data"):
                        await until(lambda: not gateway.gateway.fleet.listening)
                        begun = time.monotonic()
                        while time.monotonic() - begun < 4.0:
                            async with gateway.client.get(gateway.url + "/healthz") as response:
                                assert (await response.json())["redis"] == "ok"
                            answers[await gateway.status(key)] += 1
                            assert not gateway.gateway.meter.leases.is_away
                            await asyncio.sleep(0.01)
                    assert set(answers) == {SERVED}
                    await until(lambda: gateway.gateway.fleet.listening, 30.0)
                    assert await gateway.status(key) == SERVED
            await operator.close()
        finally:
            server.stop()
