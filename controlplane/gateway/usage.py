"""The gateway's own account of what attempts used, on its way to the ledger.

Layer: service. One record for each attempt that a replica has taken, put into the spool when the request is settled and
shipped from there by itself: no request waits for the disk, for Redis or for Postgres. The replica's own count goes
before it (ADR 0014), so this one matters where the replica could not tell. It never holds text of a prompt or answer.

A full spool stops new requests (503 `usage_spool_full`) while there is still room for those that run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from redis.asyncio import Redis

from controlplane.gateway.metering import Counted
from controlplane.gateway.record import Outcome, RequestRecord
from controlplane.ledger.spool import Spool, SpoolError
from controlplane.ledger.stream import Shipper
from dataplane.protocol import UsageBasis, UsageRecord, encode

logger = logging.getLogger("tidegate.gateway")


class SpoolState(NamedTuple):
    """What waits: bytes not known to be in the ledger, about since when, and whether requests are refused for it."""

    waiting_bytes: int = 0
    oldest_at: float | None = None
    full: bool = False


class UsageLog:
    """One process's records. `open` inside the running loop; a log that is not open takes nothing and stops nobody."""

    def __init__(
        self,
        folder: Path,
        redis: Redis,
        *,
        gateway: str,
        max_bytes: int,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._redis = redis
        self._gateway = gateway
        self._max_bytes = max_bytes
        self._wall = wall
        self._spool: Spool | None = None
        self._shipper: Shipper | None = None
        self.written = 0
        self.lost = 0
        """Records that had no room or that no disk took; the replica's own may still come."""

    def open(self) -> None:
        """Take over what an earlier process left. Raises SpoolBusyError, and OSError when the folder is unusable."""
        self._spool = Spool(self._folder, max_bytes=self._max_bytes, wall=self._wall)
        self._shipper = Shipper(self._spool, self._redis, gateway=self._gateway)

    async def run(self) -> None:
        """Ship until cancelled."""
        assert self._shipper is not None, "the usage log is not open"
        await self._shipper.run()

    async def close(self) -> None:
        """After the last request and the shipper have ended."""
        if self._spool is not None and self._shipper is not None:
            await self._spool.close(self._shipper.stored)
            self.lost += self._spool.lost
            self._spool = None

    def write(self, record: UsageRecord) -> None:
        """Keep a record; never waits and never raises."""
        if self._spool is None:
            return
        try:
            self._spool.put(encode(record))
        except SpoolError as error:
            self.lost += 1
            if self.lost == 1:
                logger.error("A usage record was not kept: %s", error)  # noqa: TRY400  # the cause is in the sentence
        else:
            self.written += 1

    def state(self) -> SpoolState:
        return SpoolState(self.waiting_bytes, self.oldest_at, not self.accepting)

    @property
    def accepting(self) -> bool:
        """Whether there is room for the records of new requests."""
        return self._spool is None or self._spool.accepting

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are not known to be in the ledger."""
        if self._spool is None or self._shipper is None:
            return 0
        return self._spool.bytes_after(self._shipper.stored)

    @property
    def oldest_at(self) -> float | None:
        """About when the oldest of them was written."""
        return self._spool.oldest_at if self._spool is not None else None

    @property
    def shipped(self) -> int:
        """Records that the ledger has acknowledged."""
        return self._shipper.acknowledged if self._shipper is not None else 0

    @property
    def under_way(self) -> int:
        return self._shipper.under_way if self._shipper is not None else 0

    @property
    def resent(self) -> int:
        return self._shipper.resent if self._shipper is not None else 0

    @property
    def skipped_bytes(self) -> int:
        return self._spool.skipped_bytes if self._spool is not None else 0


def usage_record(record: RequestRecord, counted: Counted, bound: tuple[int, int], now: float) -> UsageRecord:
    """What a request that a replica took used, as far as its gateway knows.

    ENGINE: the answer said so, of prompt and output. COUNTED: the output is what was relayed, at least one token a
    chunk, or what the engine said of it alone. ESTIMATED: the answer arrived whole and said nothing, so the output is
    what was asked for. Where the engine did not say, the prompt is `bound`'s: (prompt, output) tokens, what a lease is
    taken for.
    """
    read, written = bound
    if counted.usage_told:
        basis, prompt, cached, output = (
            UsageBasis.ENGINE, record.prompt_tokens, record.cached_tokens, record.output_tokens
        )  # fmt: skip
    elif counted.relayed is not None:
        basis, prompt, cached, output = UsageBasis.COUNTED, read, 0, counted.relayed
    else:
        basis, prompt, cached, output = UsageBasis.ESTIMATED, read, 0, written
    grant = record.grant
    assert grant is not None, "nothing is dispatched without a key"
    return UsageRecord(
        attempt_id=record.attempt_id,
        request_id=record.request_id,
        tenant=grant.tenant,
        project=grant.project,
        key_id=grant.key_id,
        pool=record.pool,
        model=record.model,
        replica=record.replica,
        started_at=record.at,
        finished_at=max(record.at, now),
        finish=_finish(record),
        basis=basis,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
    )


def _finish(record: RequestRecord) -> str:
    """In the engine's words: its finish reason, `error`, or `abort` when the client left or the gateway stopped."""
    if record.outcome is Outcome.FINISHED:
        return record.reason
    return "error" if record.outcome is Outcome.FAILED else "abort"
