"""Reading policy ahead, so that an outage of Postgres finds it known (F15).

Layer: service. Whenever the gateway starts to hear of policy changes it reads the usable keys and their tenants' quotas
once, up to the caches' sizes. What was read ahead is only ever used while Postgres cannot answer: its first use reads
it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from controlplane.gateway.policy import PolicyChange

logger = logging.getLogger("tidegate.gateway")

T = TypeVar("T")


class Prefetch(Generic[T]):
    """`load` reads a page after an id, empty at the end; `adopt` takes it; `id_of` names one. `most` are read in all.
    `run` ends only by cancellation.
    """

    def __init__(
        self,
        noun: str,
        load: Callable[[str], Awaitable[Sequence[T]]],
        adopt: Callable[[Sequence[T]], None],
        id_of: Callable[[T], str],
        most: int,
    ) -> None:
        self._noun = noun
        self._load = load
        self._adopt = adopt
        self._id_of = id_of
        self._most = most
        self._wanted = asyncio.Event()
        self._changes = 0

    def on_listening(self) -> None:
        self._wanted.set()

    def on_silence(self) -> None:
        self._wanted.clear()

    def on_change(self, change: PolicyChange) -> None:
        self._changes += 1

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._read_all()
            except Exception as error:  # Postgres left again; listening anew will try again
                logger.warning("%s could not be read ahead (%s)", self._noun, type(error).__name__)

    async def _read_all(self) -> None:
        after, read = "", 0
        while read < self._most:
            changes = self._changes
            page = await self._load(after)
            if changes != self._changes:
                continue  # this page may be from before a change that was already announced
            if not page:
                return
            self._adopt(page)
            after, read = self._id_of(page[-1]), read + len(page)
