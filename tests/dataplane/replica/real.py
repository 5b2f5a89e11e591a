"""The real SmolLM2 behind a replica: what its tests ask, and when it is idle again."""

from __future__ import annotations

import asyncio

from tests.dataplane.replica.harness import (
    Client,
)

PARIS = "What is the capital of France? Keep it short."
CONTEXT = 512


async def every_block_is_free(client: Client) -> None:
    """Waits for it: the core says so with the frame in which it falls idle."""
    async with asyncio.timeout(60):
        while (
            await client.metric("tidegate_engine_requests_running")
            or await client.metric("tidegate_engine_requests_waiting")
            or await client.metric('tidegate_engine_kv_blocks{state="used"}')
        ):
            await asyncio.sleep(0.05)
    assert await client.metric('tidegate_engine_kv_blocks{state="free"}') == 256
    assert await client.metric('tidegate_engine_kv_blocks{state="total"}') == 256
