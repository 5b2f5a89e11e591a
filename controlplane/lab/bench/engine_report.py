"""The fake engine as a replica that a control plane knows: reports about once a second, usage until acknowledged.

Layer: service. The wire protocol is the native engine's. What cannot be told now is kept, bounded, and told later; the
requests never wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from itertools import islice

import aiohttp
import msgspec

from dataplane.protocol import (
    HEADER_KEY,
    HEADER_REQUEST,
    HEADER_TENANT,
    ReplicaState,
    Report,
    ReportAck,
    UsageBasis,
    UsageRecord,
    encode,
)

INTERVAL_S = 1.0
TIMEOUT_S = 10.0
USAGE_PER_REPORT = 1000
MAX_WAITING = 200_000
"""Usage records kept while nobody takes them; the oldest go first."""

_NAMES = re.compile(
    rb"\r\n(" + b"|".join(name.encode() for name in (HEADER_TENANT, HEADER_KEY, HEADER_REQUEST)) + rb"): *([^\r]+)",
    re.IGNORECASE,
)
_read_ack = msgspec.msgpack.Decoder(ReportAck).decode


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who reports: a replica of `pool` that serves `model` at `url`."""

    replica: str
    pool: str
    model: str
    url: str


class UsageBook:
    """Usage records in the order they were made."""

    def __init__(self, who: Identity) -> None:
        self._who = who
        self._waiting: deque[UsageRecord] = deque(maxlen=MAX_WAITING)
        self.added = 0
        self.crowded = asyncio.Event()
        """A whole report's worth is waiting."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, head: bytes, attempt: str, prompt: int, output: int, begun: float) -> None:
        """A request has ended; `head` is its HTTP head, which says whose it was."""
        named = {name.lower(): value.decode("latin-1") for name, value in _NAMES.findall(head)}
        who = self._who
        self.keep(
            UsageRecord(
                attempt_id=attempt,
                request_id=named.get(HEADER_REQUEST.encode(), ""),
                tenant=named.get(HEADER_TENANT.encode(), ""),
                key_id=named.get(HEADER_KEY.encode(), ""),
                pool=who.pool,
                model=who.model,
                replica=who.replica,
                started_at=begun,
                finished_at=max(begun, time.time()),
                finish="length",
                basis=UsageBasis.ENGINE,
                prompt_tokens=prompt,
                cached_tokens=0,
                output_tokens=output,
            )
        )

    def keep(self, record: UsageRecord) -> None:
        """Tell it until it is acknowledged."""
        self.added += 1
        self._waiting.append(record)
        if len(self._waiting) >= USAGE_PER_REPORT:
            self.crowded.set()

    def batch(self) -> list[UsageRecord]:
        return list(islice(self._waiting, USAGE_PER_REPORT))

    def acknowledge(self, ids: list[str]) -> None:
        """Forget the records that are stored: always the oldest, as they were sent."""
        stored = set(ids)
        while self._waiting and self._waiting[0].attempt_id in stored:
            self._waiting.popleft()
        self.crowded.clear()


class EngineReporter:
    """Reports until cancelled; one report is under way at a time."""

    def __init__(self, who: Identity, usage: UsageBook, control_url: str, token: str) -> None:
        self._who = who
        self._usage = usage
        self._url = f"{control_url.rstrip('/')}/internal/v1/reports"
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/msgpack"}
        self._started = time.time()
        self._boot = time.time_ns() // 1_000_000
        self._sequence = 0
        self._acknowledged = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            while True:
                if not await self._report(session):
                    await asyncio.sleep(INTERVAL_S)
                elif len(self._usage) < USAGE_PER_REPORT:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(INTERVAL_S):
                            await self._usage.crowded.wait()

    async def _report(self, session: aiohttp.ClientSession) -> bool:
        self._sequence += 1
        who = self._who
        report = Report(
            replica=who.replica,
            pool=who.pool,
            model=who.model,
            url=who.url,
            boot_epoch=self._boot,
            core_epoch=1,
            sequence=self._sequence,
            acknowledged=self._acknowledged,
            sent_at=time.time(),
            started_at=self._started,
            state=ReplicaState.READY,
            usage=(batch := self._usage.batch()),
            usage_left=len(self._usage) - len(batch),
        )
        try:
            async with session.post(self._url, data=encode(report), headers=self._headers) as answer:
                if answer.status != 200:
                    return False
                ack = _read_ack(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return False
        self._acknowledged = max(self._acknowledged, ack.sequence)
        self._usage.acknowledge(ack.usage_ids)
        return True
