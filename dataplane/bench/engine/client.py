"""Streamed completions over HTTP, timed at the client, and what each answer must hold to count.

Layer: service. The same client measures every side. It checks that the server read as many prompt tokens and made as
many output tokens as it was asked for: one that stops early is wrong, not fast. It decides nothing about loads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from dataplane.bench.engine.prompts import Prompt
from dataplane.bench.errors import SideError

READ_S = 600.0
"""Silence after which a server counts as hung."""
CACHED_BY_CHANCE = 16
"""Prompt tokens, a block of KV, that may be found in a cache although no prompt came before."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how one side is asked. `extra` is added to every body."""

    name: str
    url: str
    model: str
    token: str = ""
    takes_ids: bool = True
    """Whether a prompt may be a list of token ids; else it is text."""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: exactly `output` tokens are wanted, `at` seconds after the load began."""

    prompt: Prompt
    output: int
    at: float = 0.0
    may_be_cached: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds on the monotonic clock. `first` and `last` are when the first and the last token arrived."""

    due: float
    first: float
    last: float
    tokens: int
    cached: int | None

    @property
    def ttft(self) -> float:
        """From when the request was due, so that a late send counts."""
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """(last − first) / (n − 1); 0 for a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Caller:
    """Asks one side. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.endpoint.token}"} if self.endpoint.token else {}
        self._session = aiohttp.ClientSession(
            # Servers close idle connections after a time of their own: a request on one of those would be lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=READ_S),
            headers=headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def all(self, asks: Iterable[Ask]) -> list[Answer]:
        """Every answer, each request sent when it is due. Raises SideError for the first that fails; the others are
        given up."""
        begun = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.one(ask, begun)) for ask in asks]
        except* SideError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def one(self, ask: Ask, begun: float | None = None) -> Answer:
        """Raises SideError."""
        due = (time.perf_counter() if begun is None else begun) + ask.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        try:
            return await self._stream(ask, due)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = str(error) or type(error).__name__
            raise SideError(f"{self.endpoint.name} broke off: {what}") from None

    async def _stream(self, ask: Ask, due: float) -> Answer:
        assert self._session is not None
        name, stream = self.endpoint.name, _Stream(self.endpoint.name)
        body = msgspec.json.encode(self._body(ask))
        address = f"{self.endpoint.url}/v1/completions"
        async with self._session.post(address, data=body, headers={"content-type": "application/json"}) as response:
            if response.status != 200:
                raise SideError(f"{name} refused with {response.status}: {(await response.text())[:300]}")
            async for chunk in response.content.iter_any():
                stream.take(chunk, time.perf_counter())
        return stream.answer(ask, due)

    def _body(self, ask: Ask) -> dict[str, Any]:
        prompt: Any = list(ask.prompt.ids) if self.endpoint.takes_ids else ask.prompt.text
        if prompt is None:
            raise SideError(f"{self.endpoint.name} takes texts only, and this model's vocabulary gives none")
        return {
            "model": self.endpoint.model,
            "prompt": prompt,
            "max_tokens": ask.output,
            "temperature": 0.0,
            "stream": True,
            **self.endpoint.extra,
        }


class _Stream:
    """The events of one answer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = b""
        self._first = self._last = 0.0
        self._usage: _Usage | None = None

    def take(self, chunk: bytes, now: float) -> None:
        """Raises SideError."""
        *lines, self._held = (self._held + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                continue
            try:
                event = _decode(data)
            except msgspec.DecodeError as error:
                raise SideError(f"{self._name} sent what is no event of a completion: {error}") from None
            if event.error is not None:
                said = event.error.get("message", event.error) if isinstance(event.error, dict) else event.error
                raise SideError(f"{self._name} ended with an error: {str(said)[:300]}")
            if event.choices:
                self._first = self._first or now
                self._last = now
            self._usage = event.usage or self._usage

    def answer(self, ask: Ask, due: float) -> Answer:
        """Raises SideError for an answer that does not hold what was asked for."""
        usage = self._usage
        if usage is None:
            raise SideError(f"{self._name} broke off its answer: there is no usage at its end")
        if usage.completion_tokens != ask.output:
            raise SideError(f"{self._name} made {usage.completion_tokens} tokens where {ask.output} were asked for")
        if usage.prompt_tokens != len(ask.prompt.ids):
            raise SideError(f"{self._name} read {usage.prompt_tokens} prompt tokens of {len(ask.prompt.ids)}")
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        if cached is not None and cached > CACHED_BY_CHANCE and not ask.may_be_cached:
            raise SideError(f"{self._name} had {cached} tokens of a new prompt in its cache")
        if not self._first:
            raise SideError(f"{self._name} showed no token")
        return Answer(due, self._first, self._last, usage.completion_tokens, cached)
