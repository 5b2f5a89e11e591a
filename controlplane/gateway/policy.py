"""Hearing of policy changes: one LISTEN connection to Postgres.

Layer: service. Whoever caches policy subscribes: told when listening starts (anything may have changed before), when
it stops (believe nothing for long), and of each committed change. The connection is checked every `HEARTBEAT_S`, so a
silent network counts as silence. It must never decide what a change means.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Protocol

import asyncpg
import msgspec

from controlplane.db import POLICY_CHANNEL
from controlplane.settings import Secret

HEARTBEAT_S = 0.5
ANSWER_S = 1.0
CONNECT_S = 3.0
RECONNECT_S = (0.1, 2.0)

logger = logging.getLogger("tidegate.gateway")


class PolicyChange(msgspec.Struct, frozen=True):
    """One notification: which row of which table changed, and the policy's epoch after it."""

    table: str
    id: str
    epoch: int


class PolicySubscriber(Protocol):
    def on_listening(self) -> None: ...

    def on_silence(self) -> None: ...

    def on_change(self, change: PolicyChange) -> None: ...


_CHANGE = msgspec.json.Decoder(PolicyChange, strict=False)


class PolicyFeed:
    """Keeps the LISTEN connection and tells the subscribers. `run` ends only by cancellation."""

    def __init__(self, database_url: Secret, subscribers: Sequence[PolicySubscriber]) -> None:
        self._url = database_url
        self._subscribers = subscribers
        self.listening = False
        self.epoch = 0
        """The newest epoch heard of."""

    async def run(self) -> None:
        low, high = RECONNECT_S
        delay = low
        while True:
            try:
                await self._listen()
            except Exception as error:  # whatever it was, silence must be declared and listening tried again
                delay = min(high, delay * 2) if not self.listening else low
                self._set_listening(False, type(error).__name__)
            except asyncio.CancelledError:
                self._set_listening(False, "stopping")
                raise
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311  # spreads reconnects, hides nothing

    async def _listen(self) -> None:
        """Listen until the connection breaks; raises what broke it."""
        closed = asyncio.Event()
        connection = await asyncpg.connect(
            self._url.reveal(),
            timeout=CONNECT_S,
            command_timeout=ANSWER_S,
            server_settings={"application_name": "tidegate gateway policy"},
        )
        try:
            connection.add_termination_listener(lambda _: closed.set())
            await connection.add_listener(POLICY_CHANNEL, self._heard)
            self._set_listening(True, "")
            while not closed.is_set():
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await closed.wait()
                except TimeoutError:
                    await connection.execute("SELECT 1")
            raise ConnectionError("the connection was closed")
        finally:
            connection.terminate()

    def _heard(self, connection: object, pid: int, channel: str, payload: object) -> None:
        try:
            change = _CHANGE.decode(str(payload))
        except msgspec.DecodeError:
            logger.error("A policy notification could not be read; everything cached is read again")  # noqa: TRY400  # the cause is in the sentence
            for subscriber in self._subscribers:
                subscriber.on_listening()
            return
        self.epoch = max(self.epoch, change.epoch)
        for subscriber in self._subscribers:
            subscriber.on_change(change)

    def _set_listening(self, listening: bool, why: str) -> None:
        if listening == self.listening:
            return
        self.listening = listening
        if listening:
            logger.info("Listening for policy changes")
        else:
            logger.warning("Not listening for policy changes (%s); cached policy is read again when it ages", why)
        for subscriber in self._subscribers:
            if listening:
                subscriber.on_listening()
            else:
                subscriber.on_silence()
