"""Steady requests on several gateways, in a thread of its own, and how each ended.

Layer: service. An open loop: arrivals do not wait for answers. A request that is refused or gets no answer is counted
and not repeated; who leaves does so on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from controlplane.lab.bench import requests
from controlplane.lab.bench.requests import Target
from controlplane.lab.chaos.checks import Answers

MOST_AT_ONCE = 128
TIMEOUT_S = 30.0
STREAMED, LEAVING, LONG = 0.6, 0.12, 0.1
END_S = 40.0


@dataclass(frozen=True, slots=True)
class Ended:
    """One request: when it was sent (monotonic), and how it ended: ok, left, cut, unanswered or `STATUS code`."""

    sent_at: float
    how: str
    gateway: str

    @property
    def disturbed(self) -> bool:
        """Not what a quiet deployment does: a limit that is reached, or a client that leaves, is."""
        return self.how not in {"ok", "left"} and not self.how.startswith("429")


class Load:
    """`rate` requests a second over `targets` until the context ends. `take` gives what ended since the last call."""

    def __init__(self, targets: Sequence[Target], rate: float, seed: int) -> None:
        self._targets = targets
        self._rate = rate
        self._rng = Random(seed)  # noqa: S311 - a load
        self._ended: list[Ended] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="chaos-load", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(END_S)

    @property
    def ended(self) -> list[Ended]:
        """All that has ended so far."""
        return list(self._ended)

    async def _run(self) -> None:
        running: set[asyncio.Task[None]] = set()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            due = time.monotonic()
            while not self._stop.is_set():
                due += self._rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if len(running) < MOST_AT_ONCE:
                    task = asyncio.create_task(self._one(client))
                    running.add(task)
                    task.add_done_callback(running.discard)
            await asyncio.gather(*running, return_exceptions=True)

    async def _one(self, client: aiohttp.ClientSession) -> None:
        rng = self._rng
        target = rng.choice(self._targets)
        stream = rng.random() < STREAMED
        tokens = rng.randint(80, 160) if rng.random() < LONG else rng.randint(4, 30)
        leave_after = rng.uniform(0.02, 0.6) if stream and rng.random() < LEAVING else None
        body = requests.body(target, tokens=tokens, stream=stream, pace={"first_ms": "30", "token_ms": "15"})
        sent_at = time.monotonic()
        try:
            async with asyncio.timeout(leave_after):
                how = await self._answer(client, target, body, stream=stream)
        except TimeoutError:
            how = "left" if leave_after is not None else "unanswered"
        except (aiohttp.ClientError, OSError):
            how = "unanswered"
        self._ended.append(Ended(sent_at, how, target.name))

    async def _answer(self, client: aiohttp.ClientSession, target: Target, body: bytes, *, stream: bool) -> str:
        url = f"http://127.0.0.1:{target.port}{target.path}"
        headers = {**requests.headers(target)}
        async with client.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                return f"{response.status} {_code(await response.read())}"
            try:
                whole = await response.read()
            except aiohttp.ClientError:
                return "cut"
            return "ok" if not stream or whole.endswith(b"data: [DONE]\n\n") else "cut"


def summed(ended: Sequence[Ended]) -> Answers:
    """What `ended` comes to."""
    answers = Answers(requests=len(ended))
    for one in ended:
        match one.how:
            case "ok":
                answers.ok += 1
            case "left":
                answers.left += 1
            case "cut":
                answers.cut += 1
            case "unanswered":
                answers.unanswered += 1
            case code:
                answers.refused[code] += 1
    return answers


def _code(body: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        answer: Any = msgspec.json.decode(body)
        return str(answer["error"]["code"])
    return "without a code"
