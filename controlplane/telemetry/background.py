"""Background tasks that live exactly as long as the application.

Layer: service. Starts coroutines with the process and stops them with it; one that ends with an error is logged
and started again after a pause, so that a defect in one report cannot silence a process for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from litestar import Litestar

from controlplane.component import Lifespan

log = logging.getLogger("tidegate.background")

RESTART_PAUSE_S = 1.0


def running(**tasks: Callable[[], Awaitable[None]]) -> Lifespan:
    """A lifespan that runs the named tasks."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        started = [asyncio.create_task(_keep(name, run), name=name) for name, run in tasks.items()]
        try:
            yield
        finally:
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    return lifespan


async def _keep(name: str, run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            log.exception("background task %s failed; starting it again", name)
        else:
            return
        await asyncio.sleep(RESTART_PAUSE_S)
