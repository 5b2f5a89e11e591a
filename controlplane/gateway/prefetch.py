"""Reading keys ahead, so that an outage of Postgres finds them known (F15).

Layer: service. Whenever the gateway starts to hear of policy changes it reads the usable keys once, up to the cache's
size. What was read ahead is only ever used while Postgres cannot answer: a key's first use reads it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from controlplane.gateway.auth import CAPACITY, KeyDirectory
from controlplane.gateway.policy import PolicyChange
from controlplane.tenants.schemas import KeyGrant

logger = logging.getLogger("tidegate.gateway")

LoadPage = Callable[[str], Awaitable[list[KeyGrant]]]


class KeyPrefetch:
    """`load` reads a page of keys after an id, empty at the end. `run` ends only by cancellation."""

    def __init__(self, load: LoadPage, keys: KeyDirectory) -> None:
        self._load = load
        self._keys = keys
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
                logger.warning("API keys could not be read ahead (%s)", type(error).__name__)

    async def _read_all(self) -> None:
        after, read = "", 0
        while read < CAPACITY:
            changes = self._changes
            page = await self._load(after)
            if changes != self._changes:
                continue  # this page may be from before a change that was already announced
            if not page:
                return
            self._keys.adopt(page)
            after, read = page[-1].key_id, read + len(page)
