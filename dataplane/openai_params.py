"""The parameters both generating endpoints share, and how they become sampling parameters.

Layer: service. Pure. Ranges are OpenAI's where OpenAI has the parameter.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from dataplane.api_error import invalid
from dataplane.openai_fields import shown, within
from dataplane.openai_grammar import read_grammar
from dataplane.protocol import SamplingParams

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_INT = 2**31 - 1


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters both endpoints share. `user` and `safety_identifier` only identify an end user."""

    model: str
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    user: str = ""
    safety_identifier: str = ""
    response_format: Any = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    prompt_logprobs: int | None = None
    structured_outputs: Any = None


def _stops(body: Body) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop may hold at most {MAX_STOPS} strings, got {len(stops)}", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return stops


def read_params(
    body: Body, max_tokens: int | None, limit_param: str, logprobs: int | None
) -> tuple[SamplingParams, str]:
    """How to sample, and the name by which the grammar came."""
    if max_tokens is not None and not 1 <= max_tokens <= MAX_INT:
        raise invalid(f"{limit_param} must be between 1 and {MAX_INT}, got {shown(max_tokens)}", limit_param)
    if len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    if not 0 <= body.min_tokens <= MAX_INT:
        raise invalid(f"min_tokens must be between 0 and {MAX_INT}", "min_tokens")
    if body.prompt_logprobs is not None:
        within("prompt_logprobs", body.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if body.stream:
            raise invalid("prompt_logprobs cannot be used with stream", "prompt_logprobs")
    grammar, grammar_param = read_grammar(body.response_format, body.structured_outputs)
    if grammar is not None and body.ignore_eos:
        raise invalid(f"ignore_eos cannot be used with {grammar_param}: its end is the end of sequence", "ignore_eos")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=within("temperature", body.temperature, 0.0, 2.0),
        top_k=0 if body.top_k == -1 else min(body.top_k, MAX_INT),
        top_p=within("top_p", body.top_p, 0.0, 1.0),
        min_p=within("min_p", body.min_p, 0.0, 1.0),
        presence_penalty=within("presence_penalty", body.presence_penalty, -2.0, 2.0),
        frequency_penalty=within("frequency_penalty", body.frequency_penalty, -2.0, 2.0),
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=_stops(body),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_logit_bias(body),
        grammar=grammar,
    )
    return params, grammar_param


def read_choices(body: Body) -> int:
    """Answers for each prompt."""
    if not 1 <= body.n <= MAX_CHOICES:
        raise invalid(f"n must be between 1 and {MAX_CHOICES}, got {shown(body.n)}", "n")
    return body.n


def _logit_bias(body: Body) -> dict[int, float]:
    if len(body.logit_bias) > MAX_BIASES:
        raise invalid(f"logit_bias may hold at most {MAX_BIASES} tokens, got {len(body.logit_bias)}", "logit_bias")
    biases: dict[int, float] = {}
    for token, bias in body.logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise invalid(f"logit_bias names {token[:50]!r}, which is no token id", "logit_bias")
        if not -100.0 <= bias <= 100.0 or math.isnan(bias):
            raise invalid(f"logit_bias must be between -100 and 100, got {shown(bias)} for token {token}", "logit_bias")
        if int(token) in biases:
            raise invalid(f"logit_bias names the token {int(token)} twice", "logit_bias")
        biases[int(token)] = bias
    return biases


def read_bad_words(body: Body) -> tuple[str, ...]:
    """Texts that may not come."""
    if len(body.bad_words) > MAX_BAD_WORDS:
        raise invalid(f"bad_words may hold at most {MAX_BAD_WORDS} texts, got {len(body.bad_words)}", "bad_words")
    if not all(word.strip() and len(word) <= MAX_STOP_CHARACTERS for word in body.bad_words):
        raise invalid(f"a bad word must have 1 to {MAX_STOP_CHARACTERS} characters, not all blank", "bad_words")
    return tuple(body.bad_words)


def read_include_usage(body: Body) -> bool:
    """Whether the stream ends with its usage."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid("stream_options needs stream to be true", "stream_options")
    if body.stream_options.include_obfuscation:
        raise invalid(
            "stream_options.include_obfuscation is not supported by this engine",
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        )
    return body.stream_options.include_usage
