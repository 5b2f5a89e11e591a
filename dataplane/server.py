"""The replica's server: HTTP, the engine core and the reports as one process, and the order of start and stop.

Layer: service. One process, one event loop: granian serves embedded in it, the engine core is a child process. It
holds no request state (see `attempt`), knows no address (see `routes`) and has no policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server

from dataplane.replica import Replica
from dataplane.reporter import GaugeSampler, HttpTransport, Reporter
from dataplane.routes import ReplicaApp

logger = logging.getLogger(__name__)

BACKLOG = 1024
SPARE_CONNECTIONS = 256
"""Connections beyond one for each sequence: refusals, health checks, scrapes."""
LAST_REPORT_S = 2.0
HTTP_STOP_S = 2.0


class ReplicaServer:
    """Runs one replica: core, reports and HTTP, and takes them down in order."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        config = replica.config
        self._http: Any = Server(
            ReplicaApp(replica),
            address=config.host,
            port=config.port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            # Connections served at once; left alone it would be the backlog, and more streams would wait unseen.
            backpressure=config.max_sequences + SPARE_CONNECTIONS,
            log_enabled=False,
        )
        self._transport: HttpTransport | None = None
        self._reporter: Reporter | None = None
        if config.control_url:
            self._transport = HttpTransport(config.control_url, config.internal_token)
            self._reporter = Reporter(replica, self._transport, interval_s=config.report_interval_s)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Ask to stop: running requests may go on for a while; a second call ends them."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> bool:
        """Serve until told to stop. False when it ended by itself: the core can never work, or HTTP broke."""
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        await self.replica.start()
        http = asyncio.create_task(self._http.serve(), name="http")
        background = [asyncio.create_task(GaugeSampler(self.replica).run(), name="gauges")]
        if self._reporter is not None:
            background.append(asyncio.create_task(self._reporter.run(), name="reporter"))
        ends = [
            asyncio.create_task(self._stop.wait(), name="stop"),
            asyncio.create_task(self.replica.core.hopeless.wait(), name="hopeless"),
        ]
        await asyncio.wait([*ends, http, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in (http, *background):
            if task.done() and (error := task.exception()) is not None:
                logger.critical("%s ended: %r", task.get_name(), error, exc_info=error)
        asked = self._stop.is_set()
        await self._take_down(http, [*ends, *background])
        for number in signals:
            loop.remove_signal_handler(number)
        return asked

    async def _take_down(self, http: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        """Requests first, then the core, the last report, the tasks, HTTP, and the journal at the very end."""
        config = self.replica.config
        await self.replica.stop(config.drain_s, hurry=self._hurry)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reporter is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_REPORT_S):
                    await self._reporter.report()
        if self._transport is not None:
            await self._transport.close()
        self._http.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HTTP_STOP_S):
                await asyncio.shield(http)
        http.cancel()
        await asyncio.gather(http, return_exceptions=True)
        await self.replica.journal.close()
