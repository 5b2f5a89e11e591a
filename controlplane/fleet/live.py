"""A replica's load as of a second ago, in Redis: published to gateways, kept briefly for pages.

Layer: service. Best effort by design: a slow or absent Redis delays no report and loses only freshness, never a
durable fact (those are in Postgres). What waits to be sent is one newest entry per replica, never a queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from controlplane.fleet.schemas import LOAD_CHANNEL, ReplicaLoad
from dataplane.protocol import Gauges, ReplicaState, encode

log = logging.getLogger("tidegate.fleet")

GAUGES_TTL_S = 60
"""Gauges of a replica that fell silent are forgotten after this long."""
SEND_TIMEOUT_S = 2.0
"""Longest wait for Redis before what was to be sent is given up: newer loads replace it anyway."""


class LiveGauges(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's gauges at `at` (Unix seconds)."""

    at: float
    boot_epoch: int
    gauges: Gauges


class LiveLoad(NamedTuple):
    """What one report says of the replica's load."""

    replica: str
    state: ReplicaState
    live: LiveGauges


_decode = msgspec.msgpack.Decoder(LiveGauges).decode


def gauges_key(replica: str) -> str:
    return f"tidegate:gauges:{replica}"


async def read_gauges(redis: Redis, replicas: Sequence[str]) -> Mapping[str, LiveGauges]:
    """The live gauges of `replicas` that reported within a minute; empty when Redis is away."""
    if not replicas:
        return {}
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            packed = await redis.mget([gauges_key(replica) for replica in replicas])
    except (RedisError, OSError, TimeoutError) as error:
        log.warning("live gauges are not available: %s", type(error).__name__)
        return {}
    found = zip(replicas, packed, strict=True)
    return {replica: _decode(value) for replica, value in found if isinstance(value, bytes)}


class LoadPublisher:
    """Sends each replica's newest load to Redis from a task of its own; `offer` never waits."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._newest: dict[str, LiveLoad] = {}
        self._offered = asyncio.Event()
        self.sent = 0
        self.failures = 0

    def offer(self, loads: Iterable[LiveLoad]) -> None:
        """Take in the newest loads; one still waiting is replaced."""
        for load in loads:
            self._newest[load.replica] = load
        if self._newest:
            self._offered.set()

    async def run(self) -> None:
        """Send what is offered until cancelled."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            batch, self._newest = list(self._newest.values()), {}
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._send(batch)
            except (RedisError, OSError, TimeoutError) as error:
                self.failures += 1
                log.warning("load of %d replicas was not published: %s", len(batch), type(error).__name__)
            else:
                self.sent += len(batch)

    async def _send(self, batch: Sequence[LiveLoad]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for replica, state, live in batch:
            gauges = live.gauges
            load = ReplicaLoad(
                replica=replica,
                at=live.at,
                state=state,
                running=gauges.running,
                waiting=gauges.waiting,
                blocks_free=gauges.blocks_free,
                blocks_total=gauges.blocks_total,
                credits=gauges.credits,
            )
            pipeline.set(gauges_key(replica), encode(live), ex=GAUGES_TTL_S)
            pipeline.publish(LOAD_CHANNEL, encode(load))
        await pipeline.execute()
