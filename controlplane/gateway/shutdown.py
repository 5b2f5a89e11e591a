"""Starting to drain the moment a shutdown is asked for.

Layer: service. The HTTP server waits for open connections before it ends the application's lifespan, so a long stream
would only ever be killed. This hears the signal itself, beside the server's own handling, and lets the gateway finish
or cut its streams in time. It must never end the process.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from controlplane.gateway.gateway import Gateway

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def drain_on_signal(gateway: Gateway) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT start `gateway.drain()`. Outside the main thread signals cannot be heard.

    The event loop learns of signals through its wake-up descriptor; the Python-level handler set here runs as well as
    the server's, and calls whatever was there before it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def start() -> None:
        if not drains:
            drains.append(loop.create_task(gateway.drain(), name="gateway drain"))

    previous = {number: signal.getsignal(number) for number in SIGNALS}

    def heard(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(start)
        before = previous[signal.Signals(number)]
        if callable(before):
            before(number, frame)

    for number in SIGNALS:
        signal.signal(number, heard)
        signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
        for drain in drains:
            drain.cancel()
