"""The requests the load is made of: their bytes, and where they go.

Layer: service. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

PATH = "/v1/chat/completions"
PROMPT = "Tell" + " the story of the tide" * 99 + " again now please"
"""About 500 tokens for any BPE tokenizer: as many common words."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Who is asked: on loopback, with which key, under which name the model goes."""

    name: str
    port: int
    key: str
    model: str
    headers: tuple[tuple[str, str], ...] = ()
    path: str = PATH


def body(target: Target, *, tokens: int, stream: bool = False, pace: Mapping[str, str] | None = None) -> bytes:
    """A request body; `pace` is for the fake engine (see `wire.Pace`)."""
    asked: dict[str, Any] = {
        "model": target.model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
    }
    if stream:
        asked["stream"] = True
    if pace:
        asked["metadata"] = dict(pace)
    return msgspec.json.encode(asked)


def headers(target: Target) -> dict[str, str]:
    return {
        "host": f"127.0.0.1:{target.port}",
        "authorization": f"Bearer {target.key}",
        "content-type": "application/json",
        **dict(target.headers),
    }


def request(target: Target, content: bytes) -> bytes:
    """The whole HTTP request."""
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers(target).items())]
    lines += [f"content-length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content
