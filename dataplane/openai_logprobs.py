"""Log-probabilities as clients read them: OpenAI's two shapes, and vLLM's for those of a prompt.

Layer: service. Pure. A token is written as its text, or as its bytes where these are no text of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dataplane.logprob_trail import Placed
from dataplane.protocol import TokenLogprob

LEAST = -9999.0
"""JSON has no −∞; OpenAI writes it like this."""


class Spelling(Protocol):
    """What is needed of `dataplane.tokenizer.Tokenizer`."""

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes: ...


class LogprobBodies:
    """Writes the log-probabilities of one model's tokens."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def chat(self, placed: Sequence[Placed]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat, whole or of one chunk."""
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry, _ in placed
        ]
        return {"content": content, "refusal": None}

    def completion(self, placed: Iterable[Placed], *, top: bool) -> dict[str, Any]:
        """`choices[].logprobs` of a completion. `top`: likeliest tokens were asked for, and the token itself is among
        them in any case."""
        tokens, values, likeliest, offsets = [], [], [], []
        for entry, offset in placed:
            name = self._name(entry.token_id)
            tokens.append(name)
            offsets.append(offset)
            # The first token of a prompt comes after nothing and has no probability.
            given = not math.isnan(entry.logprob)
            values.append(_finite(entry.logprob) if given else None)
            others = {self._name(token): _finite(logprob) for token, logprob in entry.top}
            likeliest.append({**others, name: _finite(entry.logprob)} if given else None)
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": likeliest if top else None,
        }

    def prompt(self, entries: Sequence[TokenLogprob | None]) -> list[Any]:
        """vLLM's `prompt_logprobs`: for each token what was likeliest there, and itself, by id."""
        return [None if entry is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        ranks = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._name(token)}
            for token, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *ranks]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._spelling.token_bytes(token, skip_special=False)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    def _name(self, token: int) -> str:
        return _text(self._spelling.token_bytes(token, skip_special=False))


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
