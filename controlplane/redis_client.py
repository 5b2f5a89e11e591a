"""The process's Redis client: bounded waits, a bounded pool, and cancellation that is never lost.

Layer: service. Opens nothing by itself; connections are made on first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from controlplane.settings import Secret

CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 5.0
CONNECTIONS = 64


class CancellableConnection(Connection):
    """redis-py bounds each write with `asyncio.wait_for`, which in Python 3.11 loses a cancellation that arrives in
    the tick in which the write ends (cpython issue 86296): a background task then never stops. `asyncio.timeout`
    does not lose it.
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        parts = [command.encode()] if isinstance(command, str) else [command] if isinstance(command, bytes) else command
        try:
            async with asyncio.timeout(self.socket_timeout):
                await self._send_packed_command(parts)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:  # half a command may be on the wire: the connection is of no more use
            await self.disconnect(nowait=True)
            raise


def create_redis(url: Secret) -> Redis:
    """A client of `url`; a command waits for a free connection rather than opening more than CONNECTIONS."""
    pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
        url.reveal(),
        connection_class=CancellableConnection,
        max_connections=CONNECTIONS,
        timeout=5,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
        health_check_interval=15,
        client_name="tidegate",
    )
    return Redis.from_pool(pool)
