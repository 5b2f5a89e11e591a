"""What all requests of one gateway process share, and how many there are.

Layer: service. Holds the parts, bounds requests in flight and ends them in order at shutdown. It must never know what
one request is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from controlplane.admission.answers import Lease
from controlplane.admission.retry import Asker, Comebacks
from controlplane.alarms import Alarms
from controlplane.errors import CapacityError
from controlplane.gateway.asgi import body_slices
from controlplane.gateway.auth import KeyDirectory
from controlplane.gateway.counting import PromptCounter
from controlplane.gateway.departure import ASK_AFTER_S
from controlplane.gateway.dispatch import Dispatch
from controlplane.gateway.errors import capacity
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.http_client import Response
from controlplane.gateway.loads import LoadBoard
from controlplane.gateway.metering import Meter
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.prompt_log import PromptLog
from controlplane.gateway.record import RequestRecord
from controlplane.gateway.request_log import RequestLog
from controlplane.gateway.retries import RetryBudget
from controlplane.gateway.telemetry import Recorder
from controlplane.gateway.upstream import Upstream
from controlplane.gateway.usage import UsageLog
from controlplane.settings import Settings

RECEIVED_AT_LEAST = 16
"""Bodies of one tenant that may arrive at once, however few requests may be in flight."""
DRAIN_S = 2.5
"""How long running requests may go on after a shutdown was asked for; then they are cut with an error event. All of it
must be over before the server kills its worker (`serve.KILL_TIMEOUT_S`)."""
CUT_S = 0.5
"""Longest wait for cut requests to say so to their clients."""

logger = logging.getLogger("tidegate.gateway")


class Gateway:
    """The shared parts. `open` inside the running loop, `close` when it ends."""

    def __init__(
        self,
        settings: Settings,
        *,
        keys: KeyDirectory,
        fleet: FleetDirectory,
        meter: Meter,
        board: LoadBoard,
        recorder: Recorder,
        request_log: RequestLog,
        usage: UsageLog,
        metrics: GatewayMetrics,
        dispatch: Dispatch,
        prompt_log: PromptLog | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.keys = keys
        self.fleet = fleet
        self.meter = meter
        self.board = board
        self.recorder = recorder
        self.request_log = request_log
        self.usage = usage
        self.metrics = metrics
        self.prompt_log = prompt_log or PromptLog(settings)
        self.dispatch = dispatch
        self.retries = RetryBudget()
        self.bodies = body_slices()
        self.departures = Alarms(ASK_AFTER_S)
        self.rng = rng or random.Random()  # noqa: S311  # breaks ties among equals
        self._comebacks = Comebacks(settings.max_in_flight, self.rng)
        self._upstream: Upstream | None = None
        self._counter: PromptCounter | None = None
        self.draining = False
        self._drained_by = 0.0
        self.cutting = False
        """Requests still running are being ended now."""
        self._running: set[asyncio.Task[Any]] = set()
        self._receiving: Counter[str] = Counter()
        self._most_receiving = min(settings.max_in_flight, max(RECEIVED_AT_LEAST, settings.max_in_flight // 4))
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Start taking requests."""
        self._upstream = Upstream(self.settings)
        self._counter = PromptCounter(self._upstream)

    async def close(self) -> None:
        """Close the connections to replicas and leave the lines."""
        await self.dispatch.close()
        if self._upstream is not None:
            await self._upstream.close()

    async def post(
        self, lease: Lease, url: str, headers: dict[str, str], body: bytes, on_sent: Callable[[], None]
    ) -> Response:
        """Send a request that holds `lease` to a replica; there is no other way to one (F3), but to have
        its prompt counted. `on_sent` is called when it goes out. Raises UpstreamFailure.
        """
        assert isinstance(lease, Lease), "nothing is dispatched without a lease"
        assert self._upstream is not None, "the gateway is not open"
        return await self._upstream.post(url, headers, body, on_sent)

    async def count(self, tenant: str, url: str, headers: dict[str, str], body: bytes) -> int | None:
        """Tokens of the prompts of `body`, which the replica at `url` would generate from; None when nobody told."""
        assert self._counter is not None, "the gateway is not open"
        return await self._counter.count(tenant, url, headers, body)

    @property
    def in_flight(self) -> int:
        """Requests accepted and not ended."""
        return self._in_flight

    @contextmanager
    def slot(self, asker: Asker) -> Iterator[None]:
        """Room for one more request, that of `asker`, given back however it ends. Raises CapacityError (503) at once
        when there is none, or the last of it is kept for who was told to come back now.
        """
        if self.draining:
            raise self.shutting_down()
        if not self.usage.accepting:
            raise capacity("The gateway has no room left to record what requests use; try again.", "usage_spool_full")
        now = time.monotonic()
        if not self._comebacks.admits(asker, self._in_flight, now):
            seconds = self._comebacks.refuse(asker, now)
            raise capacity("Too many requests are in flight; try again.", "too_many_in_flight", retry_after_s=seconds)
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            self._comebacks.ended(time.monotonic())
            if not self._in_flight:
                self._idle.set()

    @contextmanager
    def receiving(self, tenant_id: str) -> Iterator[None]:
        """The body of one more of the tenant's requests, which has its slot, arrives. Raises CapacityError (503) when
        half of the room is taken, and a quarter by bodies of this tenant that are still to come: who sends slowly must
        not take all of it from others.
        """
        is_scarce = self._in_flight > self.settings.max_in_flight // 2
        if is_scarce and self._receiving[tenant_id] >= self._most_receiving:
            message = "Too many of this tenant's request bodies are still arriving; try again."
            raise capacity(message, "too_many_bodies")
        self._receiving[tenant_id] += 1
        try:
            yield
        finally:
            self._receiving[tenant_id] -= 1
            if not self._receiving[tenant_id]:
                del self._receiving[tenant_id]

    @contextmanager
    def running(self) -> Iterator[None]:
        """The present task relays one request; it may be cut at shutdown. Raises CapacityError (503) when all were."""
        if self.cutting:
            raise self.shutting_down()
        task = asyncio.current_task()
        assert task is not None, "only a task can be cut"
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    def shutting_down(self) -> CapacityError:
        """What a draining gateway tells whom it does not serve: to come back when it has ended, and another is here."""
        left_s = max(1, math.ceil(self._drained_by - time.monotonic()))
        return capacity("This gateway is shutting down; try again.", "gateway_shutdown", retry_after_s=left_s)

    def forged(self, tenant: str, headers: int) -> None:
        """A request of `tenant` ("" without a usable key) brought so many forged headers; they are dropped (F23)."""
        if headers:
            self.metrics.forged_headers.inc(headers)
            self.recorder.forged(tenant, headers)

    def settle(self, record: RequestRecord) -> None:
        """A request has ended: count it and write its line, once, from the one record."""
        record.e2e_s = max(0.0, time.monotonic() - record.accepted)
        self.recorder.end(record)
        self.request_log.write(record)
        self.metrics.ended(record)

    async def drain(self, grace_s: float = DRAIN_S) -> None:
        """Take no more requests, let the running ones finish within `grace_s`, then cut them."""
        self.draining = True
        self._drained_by = time.monotonic() + grace_s + CUT_S
        self.dispatch.refuse_waiting(self.shutting_down)
        if self._in_flight:
            logger.info("Shutting down: %d requests may finish within %.0f s", self._in_flight, grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self.cutting = True
            logger.warning("Shutting down: ending %d requests", len(self._running))
            for work in list(self._running):
                work.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await self._idle.wait()
        await self.request_log.flush()
