"""Clients of the fairness bench: streams of several tenants through several gateways, and what each got when.

Layer: service. Runs in the calling loop. Service is counted as it reaches the clients: a prompt when its first token
comes, an output token when it comes, each at its charge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
import msgspec

from controlplane.lab.bench.batching_engine import WORD
from dataplane.scheduling.vtc import TokenCharges

CHARGES = TokenCharges()
REFUSED_PAUSE_S = 0.05
EVENT = b'"content":" '
"""Of every event that holds a token."""


class Ask(NamedTuple):
    """One kind of request: its tenant's key, and the tokens of its prompt and answer."""

    tenant: str
    key: str
    prompt: int
    output: int

    def body(self, model: str) -> bytes:
        return msgspec.json.encode(
            {
                "model": model,
                "messages": [{"role": "user", "content": " ".join([WORD.decode()] * self.prompt)}],
                "max_tokens": self.output,
                "stream": True,
            }
        )


@dataclass(slots=True)
class Heard:
    """What one tenant got: (when, charge) in order, TTFTs with the time they ended at, and how many were refused."""

    service: list[tuple[float, float]] = field(default_factory=list)
    ttft: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    refused: int = 0
    cut: int = 0

    def charged(self, begin: float, end: float) -> float:
        return sum(charge for at, charge in self.service if begin <= at < end)

    def counted(self, begin: float, end: float) -> int:
        return sum(count for at, count in self.tokens if begin <= at < end)

    def first_tokens(self, begin: float, end: float) -> list[float]:
        return [ttft for at, ttft in self.ttft if begin <= at < end]


class Load:
    """Sends requests to `gateways` (base URLs); use as a context manager. Times are on the monotonic clock."""

    def __init__(self, gateways: Sequence[str], model: str) -> None:
        self._gateways = gateways
        self._model = model
        self._work: list[asyncio.Task[None]] = []
        self.heard: dict[str, Heard] = {}

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._session.close()

    def flood(self, ask: Ask, at_once: int) -> None:
        """Keep `at_once` requests at each gateway, each begun anew when it ends."""
        self.heard.setdefault(ask.tenant, Heard())
        body = ask.body(self._model)
        for gateway in self._gateways:
            self._work += [asyncio.create_task(self._again(gateway, ask, body)) for _ in range(at_once)]

    def pace(self, ask: Ask, every_s: float) -> None:
        """A request every so often, at one gateway after another, whatever became of those before."""
        self.heard.setdefault(ask.tenant, Heard())
        self._work.append(asyncio.create_task(self._every(ask, every_s)))

    async def _again(self, gateway: str, ask: Ask, body: bytes) -> None:
        while True:
            if not await self._one(gateway, ask, body):
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def _every(self, ask: Ask, every_s: float) -> None:
        body, number, at = ask.body(self._model), 0, time.monotonic()
        under_way: set[asyncio.Task[bool]] = set()
        try:
            while True:
                gateway = self._gateways[number % len(self._gateways)]
                task = asyncio.create_task(self._one(gateway, ask, body))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                number += 1
                at += every_s
                await asyncio.sleep(max(0.0, at - time.monotonic()))
        finally:
            for task in under_way:
                task.cancel()

    async def _one(self, gateway: str, ask: Ask, body: bytes) -> bool:
        """False when it was refused or cut."""
        heard, begun, got = self.heard[ask.tenant], time.monotonic(), 0
        headers = {"authorization": f"Bearer {ask.key}", "content-type": "application/json"}
        try:
            async with self._session.post(gateway + "/v1/chat/completions", data=body, headers=headers) as response:
                if response.status != 200:
                    heard.refused += 1
                    return False
                while data := await response.content.readany():
                    count = data.count(EVENT)
                    if not count:
                        continue
                    now = time.monotonic()
                    if not got:
                        heard.ttft.append((now, now - begun))
                        heard.service.append((now, CHARGES.of(ask.prompt, 0, 0)))
                        heard.tokens.append((now, ask.prompt))
                    got += count
                    heard.service.append((now, CHARGES.of(0, 0, count)))
                    heard.tokens.append((now, count))
        except aiohttp.ClientError:
            heard.cut += 1
            return False
        return got == ask.output


def largest_gap(one: Heard, other: Heard, weights: tuple[float, float], begin: float, end: float) -> float:
    """The most that the weighted service of two tenants differed over any interval between `begin` and `end`."""
    events = [(at, charge / weights[0]) for at, charge in one.service if begin <= at < end]
    events += [(at, -charge / weights[1]) for at, charge in other.service if begin <= at < end]
    level = low = high = 0.0
    for _, change in sorted(events):
        level += change
        low, high = min(low, level), max(high, level)
    return high - low


def vtc_bound(prompt: int, held: int, unsent: float, weight: float) -> float:
    """2·(U + S / w): U of the longest prompt and the output that the pool holds at once, S what gateways keep back."""
    most = max(CHARGES.input * prompt, CHARGES.output * held)
    return 2 * (most + unsent) / weight
