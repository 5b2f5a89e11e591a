"""Group commit of reports: many senders, one transaction, acknowledgements after it.

Layer: service. While one batch is being committed the next gathers, so the number of transactions follows the
database's speed, not the number of replicas. The queue is bounded in reports and bytes; what does not fit is
refused with 503 and stays with its sender, which keeps everything until acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.errors import CapacityError, InvalidRequestError
from controlplane.fleet.live import LoadPublisher
from controlplane.outage import away
from controlplane.telemetry.intake import Incoming, Stored, store
from controlplane.telemetry.metrics import IntakeMetrics, Refusal, Unbilled
from controlplane.telemetry.validation import RefusedError
from controlplane.telemetry.windows import ENGINE, GATEWAY
from dataplane.protocol import Report, ReportAck

log = logging.getLogger("tidegate.telemetry")

MAX_QUEUED = 4096
MAX_QUEUED_BYTES = 64 * 1024 * 1024
MAX_BATCH = 256
RETRY_AFTER_S = 2


@dataclass(slots=True)
class _Waiting:
    report: Incoming
    size: int
    done: asyncio.Future[ReportAck]


class Ingestor:
    """One process's intake. `submit` returns the acknowledgement once the report is durable."""

    def __init__(
        self,
        engine: AsyncEngine,
        publisher: LoadPublisher,
        metrics: IntakeMetrics,
        *,
        clock: Callable[[], float] = time.time,
        max_queued: int = MAX_QUEUED,
        max_batch: int = MAX_BATCH,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._metrics = metrics
        self._clock = clock
        self._max_queued = max_queued
        self._max_batch = max_batch
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()

    async def submit(self, report: Incoming, size: int) -> ReportAck:
        """Queue a report of `size` bytes and wait until it is committed.

        Raises CapacityError when the queue is full or the database is away, InvalidRequestError when the report
        was refused as a whole.
        """
        if len(self._waiting) >= self._max_queued or self._bytes + size > MAX_QUEUED_BYTES:
            self.refused(_source(report), Refusal.QUEUE_FULL)
            raise _unavailable("more reports are waiting than can be held", "ingest_full")
        waiting = _Waiting(report, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._bytes += size
        self._arrived.set()
        return await waiting.done

    def refused(self, source: str, cause: Refusal, number: int = 1) -> None:
        """Count something that was not stored."""
        if number:
            self._metrics.refused.labels(source, cause.value).inc(number)

    async def run(self) -> None:
        """Commit batch after batch until cancelled; what still waits then is refused, not forgotten by its sender."""
        batch: list[_Waiting] = []
        try:
            while True:
                await self._arrived.wait()
                batch = self._take()
                await self._commit(batch)
        finally:
            for waiting in [*batch, *self._waiting]:
                if not waiting.done.done():
                    waiting.done.set_exception(_unavailable("the control plane is stopping", "stopping"))
            self._waiting.clear()

    def _take(self) -> list[_Waiting]:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch))]
        self._bytes -= sum(waiting.size for waiting in batch)
        if not self._waiting:
            self._arrived.clear()
        self._metrics.queue.set(len(self._waiting))
        return batch

    async def _commit(self, batch: Sequence[_Waiting]) -> None:
        began = time.perf_counter()
        try:
            async with transaction(self._engine) as session:
                stored = await store(session, [waiting.report for waiting in batch], self._clock())
        except Exception as error:
            if away(error) is not None:
                self._fail(batch, Refusal.STORE_AWAY, lambda: _unavailable("the database is away", "database_away"))
                log.warning("%d reports were not stored: %s", len(batch), type(error).__name__)
            elif len(batch) > 1:
                await self._one_by_one(batch)
            else:
                defect = error
                self._fail(batch, Refusal.DEFECT, lambda: defect)
                log.exception("a report of %s could not be stored", _sender(batch[0].report)[:80])
            return
        self._metrics.batch.observe(len(batch))
        self._metrics.seconds.observe(time.perf_counter() - began)
        self._settle(batch, stored)

    async def _one_by_one(self, batch: Sequence[_Waiting]) -> None:
        """A batch that failed as a whole is stored report by report, so that one cannot fail the others (F22)."""
        for waiting in batch:
            await self._commit([waiting])

    def _settle(self, batch: Sequence[_Waiting], stored: Stored) -> None:
        for waiting, outcome in zip(batch, stored.outcomes, strict=True):
            source = _source(waiting.report)
            if isinstance(outcome, RefusedError):
                self.refused(source, Refusal.IDENTITY)
                log.warning("a report of %r was refused: %s", _sender(waiting.report)[:80], outcome)
                answer = InvalidRequestError(f"this report was refused: {outcome}", code="report_refused")
                if not waiting.done.done():
                    waiting.done.set_exception(answer)
                continue
            self._metrics.reports.labels(source).inc()
            if outcome.refused:
                log.warning("parts of a report of %r were refused: %s", _sender(waiting.report), outcome.refused[0])
            if not waiting.done.done():
                waiting.done.set_result(outcome)
        self.refused(ENGINE, Refusal.USAGE, stored.refused_usage)
        self._metrics.count_refused(ENGINE, Unbilled.UNFIT, stored.refused_usage)
        self._metrics.count_refused(ENGINE, Unbilled.LATE, stored.late_usage)
        self.refused(ENGINE, Refusal.WINDOW, stored.refused_windows)
        self._metrics.count_usage(stored.usage)
        self._publisher.offer(stored.loads)

    def _fail(self, batch: Sequence[_Waiting], cause: Refusal, error: Callable[[], Exception]) -> None:
        for waiting in batch:
            self.refused(_source(waiting.report), cause)
            if not waiting.done.done():
                waiting.done.set_exception(error())


def _source(report: Incoming) -> str:
    return ENGINE if isinstance(report, Report) else GATEWAY


def _sender(report: Incoming) -> str:
    return report.replica if isinstance(report, Report) else report.gateway


def _unavailable(why: str, code: str) -> CapacityError:
    return CapacityError(f"nothing was stored: {why}", code=code, headers={"retry-after": str(RETRY_AFTER_S)})
