"""Hearing replicas' reports: one subscription in Redis.

Layer: service. Fills the load board; when Redis is away the board's reports grow old and routing goes on by the
gateway's own counts. It must never hold up a request.
"""

from __future__ import annotations

import asyncio
import logging
import random

import msgspec
from redis.asyncio import Redis

from controlplane.fleet.schemas import LOAD_CHANNEL, ReplicaLoad
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.loads import LoadBoard

QUIET_S = 2.0
RECONNECT_S = (0.1, 2.0)

logger = logging.getLogger("tidegate.gateway")

_LOAD = msgspec.msgpack.Decoder(ReplicaLoad)


class LoadFeed:
    """Keeps the subscription; `run` ends only by cancellation. Replicas the fleet does not know are ignored."""

    def __init__(self, redis: Redis, fleet: FleetDirectory, board: LoadBoard) -> None:
        self._redis = redis
        self._fleet = fleet
        self._board = board
        self.subscribed = False

    async def run(self) -> None:
        low, high = RECONNECT_S
        delay = low
        while True:
            try:
                await self._listen()
            except Exception as error:  # whatever the driver raises, the subscription is tried again
                delay = low if self.subscribed else min(high, delay * 2)
                if self.subscribed or delay == low * 2:
                    logger.warning("Replica reports are not heard (%s); own counts carry on", type(error).__name__)
                self.subscribed = False
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311  # spreads reconnects, hides nothing

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
            await subscription.subscribe(LOAD_CHANNEL)
            self.subscribed = True
            while True:
                message = await subscription.get_message(timeout=QUIET_S)
                if message is not None:
                    self._heard(message["data"])

    def _heard(self, payload: bytes) -> None:
        try:
            load = _LOAD.decode(payload)
        except msgspec.DecodeError:
            logger.warning("A replica's load report could not be read; it is ignored")
            return
        if self._fleet.knows(load.replica):
            self._board.heard(load)
