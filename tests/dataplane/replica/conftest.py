"""A replica with the real SmolLM2, as a process of its own, for the tests of one file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.dataplane.replica.harness import (
    Client,
    Process,
    client_of,
    replica_process,
    until_ready,
)
from tests.dataplane.replica.real import CONTEXT


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One replica for this module; its KV pool is small, and it verifies its accounts whenever it is idle."""
    home = tmp_path_factory.mktemp("replica")
    flags = ("--max-model-len", str(CONTEXT), "--num-blocks", "257", "--check-when-idle", "--drain-seconds", "0.2")
    with replica_process(home, *flags) as process:
        asyncio.run(_wait(process.url))
        yield process


async def _wait(url: str) -> None:
    async with client_of(url) as client:
        await until_ready(client)


@pytest.fixture
async def client(process: Process) -> AsyncIterator[Client]:
    async with client_of(process.url) as client:
        yield client
