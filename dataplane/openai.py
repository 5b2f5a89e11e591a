"""What an OpenAI client may ask of a replica: bodies of /v1/chat/completions and /v1/completions.

Layer: service. Pure: bytes in, a typed call out, or an ApiError that names the parameter. A parameter this
replica does not support is refused by name unless its value asks for nothing; none is ignored silently.
Ranges that depend on the model (context, vocabulary) are checked later by `dataplane.request.validate_params`;
messages, tools and structured output have modules of their own.

Source: OpenAI's openapi 2.3.0; the extensions (top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, bad_words, prompt_logprobs, structured_outputs) have vLLM's names and meaning.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dataplane.api_error import ApiError, invalid
from dataplane.openai_fields import NOTHING, given, refuse_unsupported, shaped, shown, within
from dataplane.openai_messages import read_messages, read_tools
from dataplane.openai_params import (
    MAX_TOP_LOGPROBS,
    Body,
    read_bad_words,
    read_choices,
    read_include_usage,
    read_params,
)
from dataplane.protocol import SamplingParams
from dataplane.tools import ToolUse

MAX_PROMPTS = 64
MAX_BEST_OF = 20
MAX_COMPLETION_LOGPROBS = 5
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""

_UNSUPPORTED_BOTH: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_BOTH,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": NOTHING,
    "prediction": NOTHING,
    "reasoning_effort": NOTHING,
    "verbosity": NOTHING,
    "web_search_options": NOTHING,
    "prompt_cache_key": NOTHING,
    "prompt_cache_retention": NOTHING,
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {**_UNSUPPORTED_BOTH, "suffix": ("",)}
"""Known parameters that are not supported, with the values that ask for nothing and are therefore accepted."""


class _ChatBody(Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True


class _CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[Any]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None


_B = TypeVar("_B", bound=Body)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. `include_usage` asks for the usage chunk at the end of a stream."""

    model: str
    params: SamplingParams
    stream: bool
    include_usage: bool
    limit_param: str = "max_tokens"
    """Under which name the output limit came: `max_tokens` or `max_completion_tokens`."""
    limit_given: bool = True
    """The client set the output limit; a default gives way to the context."""
    grammar_param: str = ""
    """Under which name the grammar came."""
    n: int = 1
    """Answers for each prompt."""
    bad_words: tuple[str, ...] = ()
    """Texts that may not come; what tokens they are is the tokenizer's business."""
    shows_logprobs: bool = False
    """The answer tells the log-probabilities of its tokens."""
    shows_prompt_logprobs: bool = False
    """The answer tells the log-probabilities of the prompt's tokens."""

    @property
    def samples(self) -> int:
        """Sequences for each prompt, of which `n` are answered."""
        return self.n

    def own_name(self, param: str | None) -> str | None:
        """What the client calls a parameter that the engine calls `param`."""
        names = {"max_tokens": self.limit_param, "structured_outputs": self.grammar_param}
        return names.get(param or "", param)


class ChatCall(Call, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    """`{"role", "content"}` as the chat template takes them, with earlier calls to tools."""
    tools: ToolUse = ToolUse()

    def own_name(self, param: str | None) -> str | None:
        return "messages" if param == "prompt" else super().own_name(param)


class CompletionCall(Call, frozen=True, kw_only=True):
    prompts: list[str | list[int]]
    """Texts or token ids; each has `n` choices."""
    best_of: int = 1
    echo: bool = False
    """The answer begins with the prompt."""

    @property
    def samples(self) -> int:
        return self.best_of

    @property
    def choosing(self) -> bool:
        """More is sampled than answered."""
        return self.best_of > self.n


def parse_chat(raw: bytes, model: str) -> ChatCall:
    """The call in the body of /v1/chat/completions. Raises ApiError."""
    body = _decode(raw, _ChatBody, UNSUPPORTED_CHAT, model)
    messages = read_messages(body.messages)
    limit, limit_param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if limit is not None and limit != body.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        limit, limit_param = body.max_completion_tokens, "max_completion_tokens"
    within("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    params, grammar_param = read_params(body, limit, limit_param, body.top_logprobs if body.logprobs else None)
    if tools.tools and params.grammar is not None:
        raise invalid(f"{grammar_param} cannot be used together with tools", grammar_param)
    return ChatCall(
        model=body.model,
        params=params,
        stream=body.stream,
        include_usage=read_include_usage(body),
        limit_param=limit_param,
        grammar_param="tools" if tools.tools else grammar_param,
        n=read_choices(body),
        bad_words=read_bad_words(body),
        shows_logprobs=body.logprobs,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        messages=messages,
        tools=tools,
    )


def parse_completion(raw: bytes, model: str) -> CompletionCall:
    """The call in the body of /v1/completions. Raises ApiError."""
    body = _decode(raw, _CompletionBody, UNSUPPORTED_COMPLETION, model)
    n, logprobs = read_choices(body), body.logprobs
    best_of = _best_of(body, n)
    if logprobs is not None:
        within("logprobs", logprobs, 0, MAX_COMPLETION_LOGPROBS)
    limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # Which of several samples is best is told by their log-probabilities.
    params, grammar_param = read_params(body, limit, "max_tokens", 0 if best_of > n and logprobs is None else logprobs)
    if body.echo and logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=max(logprobs, params.prompt_logprobs or 0))
    return CompletionCall(
        model=body.model,
        params=params,
        stream=body.stream,
        include_usage=read_include_usage(body),
        limit_given=body.max_tokens is not None,
        grammar_param=grammar_param,
        n=n,
        bad_words=read_bad_words(body),
        shows_logprobs=logprobs is not None,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        prompts=_prompts(body.prompt),
        best_of=best_of,
        echo=body.echo,
    )


# Decoding ------------------------------------------------------------------------------------------------------


def _decode(raw: bytes, kind: type[_B], unsupported: dict[str, tuple[Any, ...]], model: str) -> _B:
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    fields = given(data)
    _check_model(fields.get("model"), model)
    refuse_unsupported(fields, unsupported, kind.__struct_fields__, "")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise shaped(str(error)) from None


def _check_model(asked: Any, served: str) -> None:
    """First of all checks: a caller at the wrong address should learn that, not what else is wrong."""
    if asked is None:
        raise invalid("model is missing", "model", "missing_parameter")
    if not isinstance(asked, str):
        raise invalid("model must be a string", "model", "invalid_type")
    if asked != served:
        raise ApiError(404, f"the model {asked[:200]!r} is not served here", code="model_not_found", param="model")


# Checking ---------------------------------------------------------------------------------------------------


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty", "prompt")
    if _is_token_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) and item and _is_token_ids(item) for item in prompt):
        return list(prompt)
    raise invalid(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids",
        "prompt",
        "invalid_type",
    )


def _is_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _best_of(body: _CompletionBody, n: int) -> int:
    """OpenAI's rules: not below n, and not streamed, as which is best is known at the end."""
    if body.best_of is None:
        return n
    if not 1 <= body.best_of <= MAX_BEST_OF:
        raise invalid(f"best_of must be between 1 and {MAX_BEST_OF}, got {shown(body.best_of)}", "best_of")
    if body.best_of < n:
        raise invalid(f"best_of must be at least n, got {body.best_of} with n {n}", "best_of")
    if body.stream and body.best_of > n:
        raise invalid("best_of cannot be used with stream", "best_of")
    return body.best_of
