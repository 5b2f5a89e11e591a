"""The parts of OpenAI responses that the gateway reads.

Layer: service. Decoding is lenient: what does not fit these shapes is relayed all the same and read as nothing.
Nothing here is ever encoded back into a response.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

MAX_TOKENS = 1 << 31
"""No request has more."""


class PromptTokensDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Any = None


class LogProbs(msgspec.Struct, gc=False):
    """Chat lists its tokens under `content`, completions under `tokens`."""

    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: LogProbs | None = None


class Chunk(msgspec.Struct, gc=False):
    """One streamed chunk, or a whole response that was not streamed."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class ErrorDetail(msgspec.Struct, gc=False):
    message: str
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct, gc=False):
    """The OpenAI error body."""

    error: ErrorDetail


Shape = TypeVar("Shape")


def usable(count: int | None) -> int | None:
    """A backend's count of tokens; None when it is none or cannot be one: one bad number must not spoil every later
    sum (F22).
    """
    return count if count is not None and 0 <= count <= MAX_TOKENS else None


_CHUNK = msgspec.json.Decoder(Chunk)
_ERROR = msgspec.json.Decoder(ErrorBody)


def _lenient(decoder: msgspec.json.Decoder[Shape], data: bytes) -> Shape | None:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def read_chunk(data: bytes) -> Chunk | None:
    """The chunk, or None when `data` is none."""
    return _lenient(_CHUNK, data)


def read_error(data: bytes) -> ErrorDetail | None:
    """The error of an OpenAI error body, or None when `data` is none."""
    body = _lenient(_ERROR, data)
    return body.error if body else None
