"""argon2id, off the event loop and a bounded number at once.

Layer: service. One hash takes 64 MiB and a quarter of a second, so at most `CONCURRENT` run and at most `WAITING`
wait; more are refused. An unknown user costs the same work as a known one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from controlplane.errors import RateLimitedError

Result = TypeVar("Result")

CONCURRENT = 2
WAITING = 32
LONGEST = 1024
"""Characters; a longer password is refused before it is hashed."""


class Passwords:
    """One process's hasher. `close()` waits for what runs."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()
        self._threads = ThreadPoolExecutor(max_workers=CONCURRENT, thread_name_prefix="argon2")
        self._pending = 0
        self._decoy: str | None = None

    async def hash(self, password: str) -> str:
        """The text to store. Raises RateLimitedError when too many wait."""
        return await self._run(self._hasher.hash, password)

    async def verify(self, stored: str | None, password: str) -> bool:
        """Whether `password` is the one behind `stored`; the same work is done when there is nothing stored."""
        if stored is None:
            if self._decoy is None:
                self._decoy = await self.hash("nobody has this password")
            await self._run(self._matches, self._decoy, password)
            return False
        return await self._run(self._matches, stored, password)

    def outdated(self, stored: str) -> bool:
        """Whether `stored` was made with weaker parameters than today's."""
        return self._hasher.check_needs_rehash(stored)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _matches(self, stored: str, password: str) -> bool:
        try:
            return self._hasher.verify(stored, password)
        except (VerificationError, InvalidHashError):
            return False

    async def _run(self, work: Callable[..., Result], *args: str) -> Result:
        if self._pending >= CONCURRENT + WAITING:
            raise RateLimitedError(
                "too many logins at once; try again in a moment", code="login_busy", headers={"retry-after": "5"}
            )
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        finally:
            self._pending -= 1
