"""Prompts and answers of tenants that asked for them to be kept, on their way to the control plane.

Layer: service. Off the request path: a request only keeps references to bytes that are there anyway. Text is read and
redacted in a thread, before it leaves this process; it is never written to this machine's disk nor to Redis. Everything
is bounded, and what does not fit, or cannot be delivered, is dropped and counted: no request waits for its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from uuid import UUID

import aiohttp
from litestar.types import Send

from controlplane.gateway.prompt_text import answer_of, prompt_of
from controlplane.gateway.record import RequestRecord
from controlplane.promptlog.redaction import Redactor
from controlplane.promptlog.schemas import MAX_BATCH, MAX_TEXT, Delivery, LoggedEntry
from controlplane.settings import Settings
from controlplane.tenants.schemas import KeyGrant, PromptLogging
from dataplane.protocol import encode

PATH = "/internal/v1/logged-requests"
MAX_ANSWER_BYTES = 256 * 1024
"""Of what the client is sent; a stream's events are many times its text."""
MAX_WAITING = 1_000
MAX_WAITING_BYTES = 32 * 1024 * 1024
PER_S = 20.0
BURST = 200.0
"""Entries of one gateway process, of all tenants together."""
ANSWER_S = 5.0
LAST_ANSWER_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
MAX_REDACTORS = 256

logger = logging.getLogger("tidegate.gateway")


class Capture:
    """One request while it runs."""

    __slots__ = ("answer", "grant", "request", "size", "whole", "wish")

    def __init__(self, grant: KeyGrant, wish: PromptLogging) -> None:
        self.grant = grant
        self.wish = wish
        self.request = b""
        """The body as it came; empty when it was refused before it was read."""
        self.answer: list[bytes] = []
        self.size = 0
        self.whole = True

    def tap(self, send: Send) -> Send:
        """`send`, remembering what goes through it up to a bound."""

        async def tapped(message: Any) -> None:
            if message["type"] == "http.response.body" and (body := message.get("body")):
                if self.size + len(body) <= MAX_ANSWER_BYTES:
                    self.answer.append(body)
                    self.size += len(body)
                else:
                    self.whole = False
            await send(message)

        return tapped


class PromptLog:
    """`begin` and `end` never wait; `run` delivers until cancelled; `last_words` delivers once, briefly."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_delivered: Callable[[int], None] = lambda _: None,
        on_dropped: Callable[[int], None] = lambda _: None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_delivered = on_delivered
        self._on_dropped = on_dropped
        self._rng = rng or random.Random()  # noqa: S311  # samples, hides nothing
        self._clock = clock
        self._left, self._refilled = BURST, clock()
        self._waiting: deque[tuple[Capture, RequestRecord]] = deque()
        self._waiting_bytes = 0
        self._unsent: list[LoggedEntry] = []
        self._arrived = asyncio.Event()
        self._redactors: dict[tuple[str, ...], Redactor] = {}
        self._failing = False

    def begin(self, grant: KeyGrant) -> Capture | None:
        """What will remember this request; None when its tenant did not ask for that, or not for this one."""
        wish = grant.prompt_log
        if wish is None or self._rng.random() >= wish.sample:
            return None
        now = self._clock()
        self._left = min(BURST, self._left + (now - self._refilled) * PER_S)
        self._refilled = now
        if self._left < 1.0:
            self._on_dropped(1)
            return None
        self._left -= 1.0
        return Capture(grant, wish)

    def end(self, capture: Capture, record: RequestRecord) -> None:
        """The request has ended; a request whose body was never read has nothing to keep."""
        if not capture.request:
            return
        size = len(capture.request) + capture.size
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + size > MAX_WAITING_BYTES:
            self._on_dropped(1)
            return
        self._waiting.append((capture, record))
        self._waiting_bytes += size
        self._arrived.set()

    async def run(self) -> None:
        pause = FIRST_PAUSE_S
        async with self._session(ANSWER_S) as session:
            while True:
                if not self._unsent and not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                if await self._deliver(session):
                    pause = FIRST_PAUSE_S
                else:
                    await asyncio.sleep(pause * self._rng.uniform(0.5, 1.5))
                    pause = min(LONGEST_PAUSE_S, pause * 2)

    async def last_words(self) -> None:
        """Deliver what is pending once; what is left is gone with this process, and counted."""
        async with self._session(LAST_ANSWER_S) as session:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_ANSWER_S):
                    while (self._unsent or self._waiting) and await self._deliver(session):
                        pass
        if left := len(self._unsent) + len(self._waiting):
            self._on_dropped(left)

    async def _deliver(self, session: aiohttp.ClientSession) -> bool:
        """Send one batch; False when nobody took it, and it is kept."""
        if not self._unsent:
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            self._waiting_bytes -= sum(len(capture.request) + capture.size for capture, _ in batch)
            self._unsent = await asyncio.to_thread(lambda: [self._entry(*one) for one in batch])
        if not self._unsent:
            return True
        body = encode(Delivery(entries=self._unsent))
        try:
            async with session.post(self._settings.control_url + PATH, data=body, allow_redirects=False) as response:
                await response.content.read(64 * 1024)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._failed(type(error).__name__)
        if status == 200:
            self._on_delivered(len(self._unsent))
        elif status == 400:
            self._on_dropped(len(self._unsent))
        else:
            return self._failed(f"status {status}")
        self._unsent = []
        self._failing = False
        return True

    def _failed(self, why: str) -> bool:
        if not self._failing:
            self._failing = True
            logger.warning("The control plane does not take logged requests (%s); they wait while there is room", why)
        return False

    def _entry(self, capture: Capture, record: RequestRecord) -> LoggedEntry:
        """Read, redact and cut; runs in a thread."""
        redactor = self._redactor(capture.wish)
        prompt, prompt_cut = prompt_of(capture.request)
        answer, answer_cut = answer_of(b"".join(capture.answer), whole=capture.whole)
        kept, said = redactor.redact(prompt, MAX_TEXT), redactor.redact(answer, MAX_TEXT)
        return LoggedEntry(
            tenant_id=UUID(capture.grant.tenant_id),
            at=record.at,
            request_id=record.request_id[:200],
            project=capture.grant.project,
            key_id=capture.grant.key_id,
            model=record.model,
            outcome=record.outcome.value if record.outcome else "",
            reason=record.reason[:200],
            status=record.status,
            prompt=kept.text[: 2 * MAX_TEXT],
            answer=said.text[: 2 * MAX_TEXT],
            cut=prompt_cut or answer_cut or kept.cut or said.cut,
            redactions=kept.replaced + said.replaced,
        )

    def _redactor(self, wish: PromptLogging) -> Redactor:
        rules = (*wish.redact, "", *wish.templates)
        known = self._redactors.get(rules)
        if known is None:
            if len(self._redactors) >= MAX_REDACTORS:
                self._redactors.clear()
            known = self._redactors[rules] = Redactor(wish.redact, wish.templates)
        return known

    def _session(self, answer_s: float) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={
                "authorization": f"Bearer {self._settings.internal_token.reveal()}",
                "content-type": "application/msgpack",
            },
            timeout=aiohttp.ClientTimeout(total=answer_s),
        )
