"""Sends what the gateway counted to the control plane, about once a second, until it is acknowledged.

Layer: service. One report in flight at a time; nothing is forgotten before its acknowledgement. A control plane that is
away costs jittered back-off, never a request.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import aiohttp
import msgspec

from controlplane.gateway.telemetry import Recorder
from controlplane.gateway.usage import SpoolState
from controlplane.settings import Settings
from dataplane.protocol import GatewayReport, ReportAck, encode

PATH = "/internal/v1/gateway-reports"
ANSWER_S = 5.0
LAST_ANSWER_S = 1.0
MAX_BACKOFF_S = 10.0
MAX_ACK_BYTES = 1 << 20

logger = logging.getLogger("tidegate.gateway")

_ACK = msgspec.msgpack.Decoder(ReportAck)


class GatewayReporter:
    """`run` sends until cancelled; `last_words` sends once more at shutdown. `boot_epoch` grows with every start."""

    def __init__(
        self,
        settings: Settings,
        recorder: Recorder,
        *,
        in_flight: Callable[[], int],
        policy_epoch: Callable[[], int],
        spool: Callable[[], SpoolState] = SpoolState,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._in_flight = in_flight
        self._spool = spool
        self._policy_epoch = policy_epoch
        self._wall = wall
        self._started_at = wall()
        self.boot_epoch = int(self._started_at * 1000)
        self.sequence = 0
        self.acknowledged = 0
        self._failing = ""

    async def run(self) -> None:
        interval = self._settings.report_interval_s
        delay = interval
        async with self._session(ANSWER_S) as session:
            while True:
                await asyncio.sleep(delay * random.uniform(0.9, 1.1))  # noqa: S311  # spreads gateways, hides nothing
                delay = interval if await self.send(session) else min(MAX_BACKOFF_S, delay * 2)

    async def last_words(self) -> None:
        """Send what is pending once, briefly."""
        async with self._session(LAST_ANSWER_S) as session:
            await self.send(session)

    async def send(self, session: aiohttp.ClientSession) -> bool:
        """One report and its acknowledgement; False when it was not stored."""
        windows, versions = self._recorder.pending()
        self.sequence += 1
        spool = self._spool()
        report = GatewayReport(
            gateway=self._settings.gateway_id,
            boot_epoch=self.boot_epoch,
            sequence=self.sequence,
            acknowledged=self.acknowledged,
            full=self.acknowledged == 0,
            sent_at=self._wall(),
            started_at=self._started_at,
            policy_epoch=self._policy_epoch(),
            in_flight=self._in_flight(),
            spool_bytes=spool.waiting_bytes,
            spool_oldest_at=spool.oldest_at or 0.0,
            spool_full=spool.full,
            windows=windows,
        )
        body = encode(report)
        try:
            async with session.post(self._settings.control_url + PATH, data=body, allow_redirects=False) as response:
                answer = await response.content.read(MAX_ACK_BYTES)
                status = response.status
        except aiohttp.ClientConnectorError as error:
            self._recorder.refused()
            return self._failed(type(error).__name__)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._recorder.doubt(versions)
            return self._failed(type(error).__name__)
        if status != 200:
            self._recorder.refused()
            return self._failed(f"status {status}")
        try:
            ack = _ACK.decode(answer)
        except msgspec.DecodeError:
            self._recorder.doubt(versions)
            return self._failed("an unreadable acknowledgement")
        return self._stored(ack, versions)

    def _stored(self, ack: ReportAck, versions: dict[int, int]) -> bool:
        self.acknowledged = ack.sequence
        if ack.sequence >= self.sequence:
            self._recorder.acknowledge(versions)
        else:
            self._recorder.doubt(versions)
        if any(command.kind == "resync" for command in ack.commands):
            self.acknowledged = 0
            self._recorder.resend_all()
        if self._failing:
            self._failing = ""
            logger.info("The control plane takes reports again")
        return True

    def _failed(self, why: str) -> bool:
        if why != self._failing:
            self._failing = why
            logger.warning("The control plane did not take the gateway's report (%s); it is kept and sent again", why)
        return False

    def _session(self, answer_s: float) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={
                "authorization": f"Bearer {self._settings.internal_token.reveal()}",
                "content-type": "application/msgpack",
            },
            timeout=aiohttp.ClientTimeout(total=answer_s),
        )
