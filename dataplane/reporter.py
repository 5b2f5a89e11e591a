"""Tells the control plane what this replica does, about once a second.

Layer: service. Builds a Report from the replica, sends it, and takes the acknowledgement: windows and usage
records that are stored, commands to carry out. Whatever happens out there, serving never waits for it: what
could not be told is kept (bounded, see `windows` and `usage`) and told later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import aiohttp
import msgspec

from dataplane.protocol import Command, Report, ReportAck, UsageRecord, encode
from dataplane.replica import Replica
from dataplane.windows import Packet

logger = logging.getLogger(__name__)

USAGE_PER_REPORT = 500
LONGEST_REASON = 400
REMEMBERED_COMMANDS = 256
TIMEOUT_S = 10.0
ACK_BYTES = 1 << 20
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 4.0

_decode_ack = msgspec.msgpack.Decoder(ReportAck).decode


class ReportError(Exception):
    """The control plane did not take the report; the message says why in one sentence."""


class Transport(Protocol):
    """How a report reaches the control plane."""

    async def post(self, body: bytes) -> bytes:
        """The acknowledgement's body. Raises ReportError."""
        ...


class HttpTransport:
    """POST {control_url}/internal/v1/reports over one kept-alive connection."""

    def __init__(self, control_url: str, token: str) -> None:
        self._url = f"{control_url.rstrip('/')}/internal/v1/reports"
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/msgpack"}
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        try:
            async with self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise ReportError(f"the control plane answered {answer.status}")
                return await _bounded(answer.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReportError(f"the control plane cannot be reached: {error or type(error).__name__}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class Reporter:
    """Sends reports until cancelled. One report is under way at a time."""

    def __init__(
        self,
        replica: Replica,
        transport: Transport,
        *,
        interval_s: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        self._replica = replica
        self._transport = transport
        self._interval_s = interval_s
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._sequence = 0
        self._acknowledged = 0
        self._policy_epoch = 0
        self._done: OrderedDict[str, None] = OrderedDict()
        self._commands: dict[str, Callable[[Command], None]] = {
            "drain": lambda _: replica.drain("the control plane asked to drain"),
            "resume": lambda _: replica.resume(),
            "resync": lambda _: replica.book.resync(),
        }
        self.failures = 0
        """Reports in a row that were not taken."""

    async def run(self) -> None:
        """Report every interval, at once when the replica's state changes, after a pause when refused."""
        while True:
            try:
                taken = await self.report()
            except Exception:
                logger.exception("a report could not be made; serving goes on")
                taken, self.failures = False, self.failures + 1
            pause = self._interval_s if taken else self._pause()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._replica.changed.wait()

    async def report(self) -> bool:
        """Send one report; whether it was taken. Never raises for what the other side does."""
        replica = self._replica
        replica.changed.clear()
        packet = replica.book.pack()
        usage = replica.journal.batch(USAGE_PER_REPORT)
        self._sequence += 1
        sequence = self._sequence
        body = encode(self._build(sequence, packet, usage))
        try:
            ack = _decode_ack(await self._transport.post(body))
        except (ReportError, msgspec.DecodeError) as error:
            self.failures += 1
            if self.failures == 1:
                logger.warning("%s; keeping everything and trying again", error)
            return False
        if self.failures:
            logger.info("the control plane takes reports again after %d failures", self.failures)
            self.failures = 0
        self._take(ack, sequence, packet)
        return True

    def _build(self, sequence: int, packet: Packet, usage: list[UsageRecord]) -> Report:
        replica, config = self._replica, self._replica.config
        return Report(
            replica=config.replica,
            pool=config.pool,
            model=config.served_model,
            url=config.advertise_url,
            boot_epoch=replica.boot_epoch,
            core_epoch=replica.core.epoch,
            sequence=sequence,
            acknowledged=self._acknowledged,
            full=packet.full,
            sent_at=replica.wall(),
            started_at=replica.started_at,
            state=replica.state,
            state_reason=replica.reason[:LONGEST_REASON],
            core_restarts=replica.core.restarts,
            policy_epoch=self._policy_epoch,
            ready=replica.ready,
            gauges=replica.gauges,
            windows=packet.windows,
            usage=usage,
            usage_left=len(replica.journal) - len(usage),
        )

    def _take(self, ack: ReportAck, sequence: int, packet: Packet) -> None:
        if ack.sequence >= sequence:
            self._acknowledged = sequence
            self._replica.book.acknowledge(packet)
        self._replica.journal.acknowledge(ack.usage_ids)
        for reason in ack.refused:
            logger.warning("the control plane set a part of report %d aside: %s", sequence, reason[:LONGEST_REASON])
        self._policy_epoch = max(self._policy_epoch, ack.policy_epoch)
        for command in ack.commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        """Carry out a command once, however often it is repeated."""
        if command.id in self._done:
            return
        self._done[command.id] = None
        if len(self._done) > REMEMBERED_COMMANDS:
            self._done.popitem(last=False)
        action = self._commands.get(command.kind)
        if action is None:
            logger.warning("the control plane asked for %r, which this replica cannot do", command.kind[:100])
        else:
            action(command)

    def _pause(self) -> float:
        """Jittered, growing, and short enough that a control plane that is back hears of us before LOST."""
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.failures, 8))
        return longest * self._rng.uniform(0.5, 1.0)


class GaugeSampler:
    """Samples the gauges into the windows at a fixed interval, whether or not anybody listens."""

    def __init__(self, replica: Replica, *, interval_s: float = 1.0) -> None:
        self._replica = replica
        self._interval_s = interval_s

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._replica.book.sample(self._replica.wall(), self._replica.gauges)


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    chunks = bytearray()
    async for chunk in content.iter_any():
        chunks += chunk
        if len(chunks) > ACK_BYTES:
            raise ReportError("the control plane's answer is too large")
    return bytes(chunks)
