"""Background work of a process, which goes on whatever happens to it.

Layer: service. Each piece of work deals with the outages it knows; what it does not know is logged, and it begins again
after a moment: a heartbeat, a queue or a shipper that stayed dead would turn one odd answer into an outage. It must
never hold up a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable

from litestar import Litestar

from controlplane.component import Lifespan

AGAIN_S = 1.0

log = logging.getLogger("tidegate.background")

Work = Callable[[], Awaitable[None]]


async def kept(name: str, work: Work) -> None:
    """Do `work`, anew whenever it fails; ends with it or by cancellation."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("background work %r failed and begins again", name)
        else:
            return
        await asyncio.sleep(AGAIN_S * random.uniform(0.5, 1.0))  # noqa: S311  # spreads processes, hides nothing


def running(**tasks: Work) -> Lifespan:
    """A lifespan that does the named pieces of work, and stops them with the application."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        started = [asyncio.create_task(kept(name, work), name=name) for name, work in tasks.items()]
        try:
            yield
        finally:
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    return lifespan
