"""Background work of a gateway, which goes on whatever happens to it.

Layer: service. Each piece of work deals with the outages it knows; what it does not know is logged, and it begins again
after a moment: a heartbeat, a queue or a shipper that stayed dead would turn one odd answer into an outage. It must
never hold up a request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

AGAIN_S = 1.0

logger = logging.getLogger("tidegate.gateway")

Work = Callable[[], Coroutine[Any, Any, None]]


async def kept(name: str, work: Work) -> None:
    """Do `work`, anew whenever it fails; ends with it or by cancellation."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("The gateway's %s failed and begins again", name)
        else:
            return
        await asyncio.sleep(AGAIN_S * random.uniform(0.5, 1.0))  # noqa: S311  # spreads gateways, hides nothing
