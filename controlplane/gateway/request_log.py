"""One JSON line per inference request, refused ones too: `requests.jsonl`.

Layer: service. Lines are the request records' numbers, the same that went into the histograms; no prompt, no answer, no
secret. Writing happens off the request path in groups; the file is rotated by size and the number of files bounded. A
full disk costs lines, never a request; requests without a usable key are rationed, so that a flood of them does not
rotate the tenants' lines away.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from controlplane.gateway.record import Outcome, RequestRecord

FLUSH_S = 0.1
MAX_WAITING = 20_000
MAX_FILE_BYTES = 32 * 1024 * 1024
FILES = 4
"""The current one and three older ones."""
STRANGERS_PER_S = 1.0
STRANGERS_BURST = 100.0
"""Lines of requests without a usable key."""

logger = logging.getLogger("tidegate.gateway")


class RequestLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`ts` is arrival in Unix seconds; durations are seconds, null where there is none. `tenant` and `key_id` are empty
    without a usable key. `finish` is OpenAI's finish reason of a finished request; `error_code` the refusal's code or
    the failure's cause of any other.
    """

    ts: float
    request_id: str
    attempt_id: str
    tenant: str
    key_id: str
    model: str
    pool: str
    replica: str
    stream: bool
    status: int
    outcome: str
    finish: str | None
    error_code: str | None
    ttft_s: float | None
    ttft_visible_s: float | None
    tpot_s: float | None
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


_encode = msgspec.json.Encoder().encode


def line_of(record: RequestRecord) -> RequestLine:
    """What the log says of an ended request."""
    finished = record.outcome is Outcome.FINISHED
    return RequestLine(
        ts=record.at,
        request_id=record.request_id,
        attempt_id=record.attempt_id,
        tenant=record.tenant,
        key_id=record.key_id,
        model=record.model,
        pool=record.pool,
        replica=record.replica,
        stream=record.stream,
        status=record.status,
        outcome=record.outcome.value if record.outcome else "",
        finish=record.reason if finished else None,
        error_code=None if finished else record.reason or None,
        ttft_s=record.ttft_s,
        ttft_visible_s=record.ttft_visible_s,
        tpot_s=record.tpot_s,
        e2e_s=record.e2e_s,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
    )


class RequestLog:
    """`write` queues a line; `run` writes groups until cancelled; `flush` writes what is queued."""

    def __init__(
        self,
        path: Path,
        *,
        on_dropped: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._on_dropped = on_dropped
        self._clock = clock
        self._strangers_left = STRANGERS_BURST
        self._refilled = clock()
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._arrived = asyncio.Event()
        self._failing = False

    def write(self, record: RequestRecord) -> None:
        """Queue the line of an ended request. Over `MAX_WAITING`, and of strangers over their ration, lines are dropped
        and counted.
        """
        if len(self._waiting) >= MAX_WAITING or (record.grant is None and not self._may_write_stranger()):
            self._on_dropped(1)
            return
        self._waiting.append(_encode(line_of(record)))
        self._arrived.set()

    def _may_write_stranger(self) -> bool:
        now = self._clock()
        earned = (now - self._refilled) * STRANGERS_PER_S
        self._refilled = now
        self._strangers_left = min(STRANGERS_BURST, self._strangers_left + earned)
        if self._strangers_left < 1.0:
            return False
        self._strangers_left -= 1.0
        return True

    async def run(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self.flush()
            await asyncio.sleep(FLUSH_S)

    async def flush(self) -> None:
        """Write everything queued so far.

        Lines leave the queue in the thread that writes them: a flush that is cancelled before its thread has begun
        loses none, and the next one waits for one that has.
        """
        if self._waiting or self._writing.locked():
            await asyncio.to_thread(self._append)

    def _append(self) -> None:
        with self._writing:
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if lines:
                self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        content = b"\n".join(lines) + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._path.open("ab") as file:
                if file.tell() and file.tell() + len(content) > MAX_FILE_BYTES:
                    self._rotate()
            with self._path.open("ab") as file:
                file.write(content)
        except OSError as error:
            self._on_dropped(len(lines))
            if not self._failing:
                logger.error("The request log cannot be written: %s", error.strerror)  # noqa: TRY400  # the cause is in the sentence
            self._failing = True
        else:
            self._failing = False

    def _rotate(self) -> None:
        """requests.jsonl → requests.jsonl.1 → … ; the oldest is overwritten."""
        for number in range(FILES - 1, 0, -1):
            source = self._path if number == 1 else self._numbered(number - 1)
            if source.exists():
                source.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
