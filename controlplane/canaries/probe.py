"""Asking a gateway as a tenant does: tiny requests with a key of the run. Layer: service.

Bounded in time and in what is read; a redirect is not followed. It judges nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from controlplane.canaries.verdict import Answer, Usage
from controlplane.settings import Secret

REQUEST_S = 10.0
CONNECT_S = 2.0
MOST_READ = 256 * 1024
NONCE = 4
"""Bytes of what makes each prompt new, so that it is not answered from a cache."""


class UnreachableError(Exception):
    """The gateway did not answer; the message says how."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One tiny request: at most `output` tokens."""

    model: str
    output: int = 1
    stream: bool = False


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _completion(text: str) -> dict[str, Any]:
    return {"prompt": text}


PROMPTS: dict[str, Callable[[str], dict[str, Any]]] = {"/chat/completions": _chat, "/completions": _completion}
"""How a prompt is said on each endpoint of the table; one without an entry cannot be probed."""


def body_of(endpoint: str, ask: Ask) -> bytes:
    """The body of a request. Every one of an `ask` is equally long and has another prompt. Raises KeyError."""
    text = f"probe {secrets.token_hex(NONCE)}"
    return msgspec.json.encode(
        {
            "model": ask.model,
            **PROMPTS[endpoint](text),
            "max_tokens": ask.output,
            "temperature": 0,
            **({"stream": True, "stream_options": {"include_usage": True}} if ask.stream else {}),
        }
    )


class Probe:
    """Requests to one endpoint of one gateway with one key. Every call raises UnreachableError."""

    def __init__(self, client: aiohttp.ClientSession, gateway: str, endpoint: str, key: Secret) -> None:
        self._client = client
        self._url = f"{gateway}/v1{endpoint}"
        self._endpoint = endpoint
        self._key = key

    async def ask(self, ask: Ask) -> Answer:
        """The whole answer to one request."""
        async with self._posted(ask) as response:
            return _answer(response, await _read(response))

    @asynccontextmanager
    async def streaming(self, ask: Ask) -> AsyncIterator[tuple[Answer, asyncio.Task[bytes]]]:
        """The head of a stream's answer, and what reads it to its end."""
        async with self._posted(msgspec.structs.replace(ask, stream=True)) as response:
            if response.status != 200:
                raw = await _read(response)
                yield _answer(response, raw), asyncio.create_task(_nothing())
                return
            reading = asyncio.create_task(_read(response))
            try:
                yield _answer(response, b"{}"), reading
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    @asynccontextmanager
    async def _posted(self, ask: Ask) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"authorization": f"Bearer {self._key.reveal()}", "content-type": "application/json"}
        try:
            async with self._client.post(
                self._url, data=body_of(self._endpoint, ask), headers=headers, allow_redirects=False
            ) as response:
                yield response
        except TimeoutError:
            raise UnreachableError(f"the gateway did not answer within {REQUEST_S:g} s") from None
        except aiohttp.ClientError as error:
            raise UnreachableError(f"the gateway cannot be reached: {type(error).__name__}") from None


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """What one run's requests go through."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, connect=CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield session


async def _nothing() -> bytes:
    return b""


async def _read(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > MOST_READ:
            raise UnreachableError(f"the answer is longer than {MOST_READ} bytes")
    return bytes(raw)


class _Error(msgspec.Struct):
    code: str | None = None
    param: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Said(msgspec.Struct):
    error: _Error | None = None
    usage: _Usage | None = None


def _answer(response: aiohttp.ClientResponse, raw: bytes) -> Answer:
    try:
        said = msgspec.json.decode(raw, type=_Said)
    except msgspec.DecodeError:
        said = _Said()
    error = said.error or _Error()
    return Answer(
        status=response.status,
        headers={name.lower(): value for name, value in response.headers.items()},
        code=error.code or "",
        param=error.param or "",
        usage=None if said.usage is None else _usage(said.usage),
    )


def _usage(said: _Usage) -> Usage:
    cached = said.prompt_tokens_details.cached_tokens if said.prompt_tokens_details else None
    return Usage(prompt=said.prompt_tokens, cached=cached or 0, output=said.completion_tokens)
