"""A small policy table that is read whole: objectives, share plans.

Layer: service. Read when a change is announced, when listening starts, and now and then anyway. What was read last goes
on while Postgres cannot answer. It must never hold up a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from controlplane.gateway.policy import PolicyChange

ANYWAY_S = 30.0
RETRY_S = 2.0
SETTLE_S = 0.02
"""Announcements this close together cost one read."""
READ_TIMEOUT_S = 5.0

logger = logging.getLogger("tidegate.gateway")

T = TypeVar("T")


class PolicyTable(Generic[T]):
    """`load` reads all of `table`; `adopt` takes it; `on_learned` hears when it is not what it was. `known` is what was
    taken last, None before. `run` ends only by cancellation.
    """

    def __init__(
        self,
        table: str,
        load: Callable[[], Awaitable[T]],
        adopt: Callable[[T], None],
        on_learned: Callable[[], None] = lambda: None,
    ) -> None:
        self._table = table
        self._load = load
        self._adopt = adopt
        self._on_learned = on_learned
        self.known: T | None = None
        self._wanted = asyncio.Event()
        self._away = False

    def on_listening(self) -> None:
        self._wanted.set()

    def on_silence(self) -> None:
        """What is known goes on."""

    def on_change(self, change: PolicyChange) -> None:
        if change.table == self._table:
            self._wanted.set()

    async def refresh(self) -> bool:
        """Read now; False when Postgres cannot answer."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                value = await self._load()
        except Exception as error:  # whatever the driver raises, what is known goes on
            if not self._away:
                logger.warning("%s cannot be read (%s); the last ones go on", self._table, type(error).__name__)
            self._away = True
            return False
        self._away = False
        learned = value != self.known
        self.restore(value)
        if learned:
            self._on_learned()
        return True

    def restore(self, value: T) -> None:
        """Take what was known before a restart, until it can be read."""
        self.known = value
        self._adopt(value)

    async def run(self) -> None:
        while True:
            self._wanted.clear()
            wait = ANYWAY_S if await self.refresh() else RETRY_S
            try:
                async with asyncio.timeout(wait):
                    await self._wanted.wait()
                    await asyncio.sleep(SETTLE_S)
            except TimeoutError:
                continue
