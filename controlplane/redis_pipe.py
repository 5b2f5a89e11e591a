"""Lua scripts on one pipelined connection, for the path of a request.

Layer: service. All callers of a process share the connection: what they send in one turn of the event loop is one
write, and answers come in that order. A caller that is cancelled leaves only its own answer unread, and the connection
as good as before. It opens the connection when it is needed, never waits longer than for it, and repeats nothing by
itself but a script whose text the server has lost. For everything else there is `redis_client`.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from controlplane.redis_client import CONNECT_TIMEOUT_S
from controlplane.settings import Secret

MOST_WAITING = 20_000
"""Calls without an answer; one more is told at once that the store cannot be reached."""
SILENCE_S = 1.0
"""A connection with calls under way that brings nothing for so long is given up."""
STRIKES = 4
"""Looks within `SILENCE_S`: an event loop that was busy itself hears what came meanwhile before the next look."""

_ERRORS: dict[str, type[RedisError]] = {
    "READONLY": ReadOnlyError,
    "OOM": OutOfMemoryError,
    "LOADING": BusyLoadingError,
    "CLUSTERDOWN": ClusterDownError,
    "MASTERDOWN": MasterDownError,
    "TRYAGAIN": TryAgainError,
    "NOAUTH": AuthenticationError,
    "WRONGPASS": AuthenticationError,
    "NOPERM": NoPermissionError,
}
_NONE = object()
_NO_SCRIPT = "NOSCRIPT"


class Script:
    """One Lua script. `keys` and `args` as `EVALSHA` has them; answers as the server gives them, text as bytes.

    Raises redis-py's exceptions: ConnectionError and its kinds while the server cannot be reached, TimeoutError when it
    has fallen silent, ResponseError and its kinds for what it says.
    """

    def __init__(self, pipe: ScriptPipe, text: str) -> None:
        self._pipe = pipe
        self._text = text.encode()
        self._digest = hashlib.sha1(self._text, usedforsecurity=False).hexdigest().encode()

    async def __call__(self, keys: Sequence[str], args: Sequence[bytes]) -> Any:
        count = b"%d" % len(keys)
        answer = await self._pipe.send(packed(b"EVALSHA", self._digest, count, *keys, *args))
        if not isinstance(answer, hiredis.ReplyError):
            return answer
        if str(answer).startswith(_NO_SCRIPT):
            answer = await self._pipe.send(packed(b"EVAL", self._text, count, *keys, *args))
            if not isinstance(answer, hiredis.ReplyError):
                return answer
        raise error_of(answer)


class ScriptPipe:
    """Scripts of the server at `url` (redis://, rediss:// or unix://, as for redis-py). `close` at the end."""

    def __init__(self, url: Secret) -> None:
        self._options: dict[str, Any] = dict(parse_url(url.reveal()))
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[_Connection] | None = None

    def script(self, text: str) -> Script:
        return Script(self, text)

    def send(self, command: bytes) -> asyncio.Future[Any]:
        """The answer to a packed command; an error that the server answers is the result, not raised."""
        connection = self._connection
        if connection is not None and connection.is_usable:
            return connection.send(command)
        return asyncio.ensure_future(self._send_opening(command))

    async def close(self) -> None:
        """End the connection; what waits for answers fails."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._connection is not None:
            self._connection.give_up(RedisConnectionError("The connection to Redis was closed"))
            await asyncio.sleep(0)  # the socket is closed in the loop's next turn

    async def _send_opening(self, command: bytes) -> Any:
        """Wait for the connection, which all who need it open together."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="open redis pipe")
            self._opening.add_done_callback(self._opened)
        connection = await asyncio.shield(self._opening)  # who leaves must not take it from the others
        return await connection.send(command)

    def _opened(self, opening: asyncio.Task[_Connection]) -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._connection = opening.result()

    async def _open(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._connect()
                try:
                    await self._introduce(connection)
                except BaseException:
                    connection.give_up(RedisConnectionError("The connection to Redis could not be opened"))
                    raise
        except TimeoutError:
            raise RedisTimeoutError("Redis did not answer a new connection in time") from None
        except RedisError:
            raise
        except OSError as error:
            raise RedisConnectionError(f"Redis cannot be reached: {error}") from error
        return connection

    async def _connect(self) -> _Connection:
        loop, options = asyncio.get_running_loop(), self._options
        if "path" in options:
            _, made = await loop.create_unix_connection(_Connection, options["path"])
            return made
        context: ssl.SSLContext | None = None
        if options.get("connection_class") is SSLConnection:
            given = {name: value for name, value in options.items() if name != "connection_class"}
            context = SSLConnection(**given).ssl_context.get()
        host, port = options.get("host", "localhost"), int(options.get("port", 6379))
        _, made = await loop.create_connection(_Connection, host, port, ssl=context)
        return made

    async def _introduce(self, connection: _Connection) -> None:
        """Say who we are, in one write."""
        options = self._options
        commands: list[tuple[str, ...]] = []
        if options.get("password"):
            names = [options["username"]] if options.get("username") else []
            commands.append(("AUTH", *names, options["password"]))
        if options.get("db"):
            commands.append(("SELECT", str(options["db"])))
        commands.append(("CLIENT", "SETNAME", "tidegate"))
        for answer in await asyncio.gather(*(connection.send(packed(*each)) for each in commands)):
            if isinstance(answer, hiredis.ReplyError):
                raise error_of(answer)


class _Connection(asyncio.Protocol):
    """Commands out in the order they came, answers back in the same."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(notEnoughData=_NONE)
        self._unsent: list[bytes] = []
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._paused = False
        self._scheduled = False
        self._watch: asyncio.TimerHandle | None = None
        self._strikes = 0
        self._over: Exception | None = None

    @property
    def is_usable(self) -> bool:
        return self._over is None

    def send(self, command: bytes) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self._over is not None or len(self._waiting) >= MOST_WAITING:
            answer.set_exception(self._over or RedisConnectionError("Too many commands wait for Redis"))
            return answer
        self._unsent.append(command)
        self._waiting.append(answer)
        if not self._scheduled and not self._paused:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        if self._watch is None:
            self._look_later()
        return answer

    def give_up(self, why: Exception) -> None:
        """End the connection; every call under way fails with `why`."""
        if self._over is not None:
            return
        self._over = why
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._unsent.clear()
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(why)

    # asyncio.Protocol -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so

    def connection_lost(self, error: Exception | None) -> None:
        self.give_up(RedisConnectionError(f"Redis closed the connection{f': {error}' if error else ''}"))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._strikes = 0
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _NONE:
                answer = waiting.popleft()
                if not answer.done():
                    answer.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            self.give_up(RedisConnectionError("Redis answered what nobody asked"))

    def _flush(self) -> None:
        self._scheduled = False
        if self._unsent and not self._paused and self._transport is not None:
            unsent, self._unsent = self._unsent, []
            self._transport.write(b"".join(unsent))

    def _look_later(self) -> None:
        self._watch = self._loop.call_later(SILENCE_S / STRIKES, self._look)

    def _look(self) -> None:
        """Nothing came since the last looks although something is awaited: nobody is there."""
        self._watch = None
        if not self._waiting:
            self._strikes = 0
            return
        self._strikes += 1
        if self._strikes > STRIKES:
            self.give_up(RedisTimeoutError(f"Redis said nothing for {SILENCE_S:g} s"))
        else:
            self._look_later()


def packed(*words: str | bytes) -> bytes:
    """A command as it goes over the wire."""
    return cast("bytes", hiredis.pack_command(words))  # type: ignore[arg-type]  # the stub has a tuple of one


def error_of(answer: hiredis.ReplyError) -> RedisError:
    """redis-py's exception for an error that the server answered."""
    said = str(answer)
    return _ERRORS.get(said.partition(" ")[0], ResponseError)(said)
