"""The fake engine's bytes: OpenAI-shaped answers, rendered once.

Layer: service. Pure. Event by event what a replica of the native engine streams, so that a gateway reads, counts and
relays the same work; only the words are made up. It never sends anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

PROMPT_TOKENS = 500
DEFAULT_TOKENS = 16
"""Output of a request that sets no limit."""
WORDS = (" the", " of", " and", " to", " in", " is", " for", " that")
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
LONGEST_S = 3600
RESPONSE_ID = "chatcmpl-bench"
CREATED = 1_700_000_000

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)

_json = msgspec.json.Encoder().encode


class Pace(msgspec.Struct, frozen=True):
    """The body's `metadata`, which a real engine refuses: how the fake one is to answer.

    `first_ms` passes before the answer or its first token, `token_ms` between tokens (0: one token of every such stream
    in each turn of the loop). With `stream` set, each token waits for the client's word that it has the one before.
    """

    first_ms: str = "0"
    token_ms: str = "0"  # noqa: S105 - a time
    stream: str = ""

    def read(self) -> Timing:
        """Raises ValueError when it is no number or no time."""
        first, token = float(self.first_ms) / 1000, float(self.token_ms) / 1000
        if not (0 <= first <= LONGEST_S and 0 <= token <= LONGEST_S):
            raise ValueError(f"first_ms and token_ms are from 0 to {LONGEST_S * 1000}")
        return Timing(first, token, int(self.stream) if self.stream else None)


class Timing(NamedTuple):
    """A `Pace` that has been read."""

    first_s: float
    token_s: float
    stream: int | None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Ask(msgspec.Struct, frozen=True):
    """What the fake engine reads of a request body."""

    stream: bool = False
    max_tokens: int = DEFAULT_TOKENS
    stream_options: StreamOptions | None = None
    metadata: Pace | None = None


read_ask = msgspec.json.Decoder(Ask).decode


class Answers:
    """The bytes for one model's name: `whole` responses and the `chunks` of streams."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.opening = chunk(self._event({"role": "assistant", "content": ""}))
        self.tokens = tuple(chunk(self._event({"content": word})) for word in WORDS)
        self.closing = chunk(self._event({}, "length"))
        self.done = chunk(DONE)
        self._wholes: dict[int, bytes] = {}

    def usage(self, tokens: int) -> bytes:
        """The chunk with the usage event."""
        return self.usage_of(usage(tokens))

    def usage_of(self, told: dict[str, Any]) -> bytes:
        """The chunk with an event of this usage."""
        return chunk(_event({**self._base(), "choices": [], "usage": told}))

    def whole(self, tokens: int) -> bytes:
        """A whole HTTP response; of each length it is rendered once."""
        known = self._wholes.get(tokens)
        if known is None:
            message = {"role": "assistant", "content": _text(tokens), "refusal": None}
            choice = {"index": 0, "logprobs": None, "finish_reason": "length", "message": message}
            body = {**self._base("chat.completion"), "choices": [choice], "usage": usage(tokens)}
            known = self._wholes[tokens] = response(200, _json(body))
        return known

    def _event(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**self._base(), "choices": [choice]})

    def _base(self, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        return {"id": RESPONSE_ID, "object": kind, "created": CREATED, "model": self.model}


def usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def response(status: int, body: bytes) -> bytes:
    """A JSON response with its head."""
    reason = {200: "OK", 400: "Bad Request", 404: "Not Found"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def error(status: int, message: str) -> bytes:
    """A refusal in OpenAI's shape."""
    detail = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    return response(status, _json({"error": detail}))


def chunk(data: bytes) -> bytes:
    """`data` as one chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json(body) + b"\n\n"


def _text(tokens: int) -> str:
    return "".join(WORDS[i % len(WORDS)] for i in range(tokens))
