"""Work that a call begins and does not wait for, each kind once at a time. Layer: service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Errands:
    """Runs in the loop that starts them."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Those under way."""
        return len(self._tasks)

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin `work`, unless its kind is under way."""
        if name not in self._tasks:
            task = asyncio.create_task(work(), name=f"leases-{name}")
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def close(self, grace_s: float) -> None:
        """Wait so long for each, and end it."""
        for task in list(self._tasks.values()):
            await asyncio.wait({task}, timeout=grace_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
