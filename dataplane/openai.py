"""What an OpenAI client may ask of a replica: bodies of /v1/chat/completions and /v1/completions.

Layer: service. Pure: bytes in, a typed call out, or an ApiError that names the parameter. A parameter this
replica does not support is refused by name unless its value asks for nothing; none is ignored silently.
Ranges that depend on the model (context, vocabulary) are checked later by `dataplane.request.validate_params`.

Source: OpenAI's openapi 2.3.0; the extensions (top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids) have vLLM's names and meaning.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from dataplane.api_error import ApiError, invalid
from dataplane.protocol import SamplingParams

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 16
MAX_PROMPTS = 64
MAX_MESSAGES = 2048
MAX_CHOICES = 128
MAX_INT = 2**31 - 1
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles and the role the chat template sees."""

_NOTHING: Final = ()
_UNSUPPORTED_BOTH: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_BOTH,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "reasoning_effort": _NOTHING,
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
    "prompt_cache_key": _NOTHING,
    "prompt_cache_retention": _NOTHING,
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_BOTH,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": _NOTHING,
    "suffix": ("",),
}
"""Known parameters that are not supported, with the values that ask for nothing and are therefore accepted."""

_MESSAGE_IGNORABLE: dict[str, tuple[Any, ...]] = {
    "name": _NOTHING,
    "refusal": _NOTHING,
    "audio": _NOTHING,
    "annotations": ([],),
    "function_call": _NOTHING,
    "tool_calls": ([],),
    "tool_call_id": _NOTHING,
}
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters both endpoints share. `user` and `safety_identifier` only identify an end user."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    user: str = ""
    safety_identifier: str = ""
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []


class _ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


class _CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[Any]


_B = TypeVar("_B", bound=_Body)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. `include_usage` asks for the usage chunk at the end of a stream."""

    model: str
    params: SamplingParams
    stream: bool
    include_usage: bool
    limit_param: str = "max_tokens"
    """Under which name the output limit came: `max_tokens` or `max_completion_tokens`."""


class ChatCall(Call, frozen=True, kw_only=True):
    messages: list[dict[str, str]]
    """`{"role", "content"}` as the chat template takes them."""


class CompletionCall(Call, frozen=True, kw_only=True):
    prompts: list[str | list[int]]
    """Texts or token ids; each is one choice."""


def parse_chat(raw: bytes, model: str) -> ChatCall:
    """The call in the body of /v1/chat/completions. Raises ApiError."""
    body = _decode(raw, _ChatBody, UNSUPPORTED_CHAT, model)
    if not body.messages:
        raise invalid("messages must hold at least one message", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise invalid(f"messages must hold at most {MAX_MESSAGES} messages, got {len(body.messages)}", "messages")
    messages = [_message(index, message) for index, message in enumerate(body.messages)]
    limit, limit_param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if limit is not None and limit != body.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        limit, limit_param = body.max_completion_tokens, "max_completion_tokens"
    return ChatCall(
        model=body.model,
        params=_params(body, limit, limit_param),
        stream=body.stream,
        include_usage=_include_usage(body),
        limit_param=limit_param,
        messages=messages,
    )


def parse_completion(raw: bytes, model: str) -> CompletionCall:
    """The call in the body of /v1/completions. Raises ApiError."""
    body = _decode(raw, _CompletionBody, UNSUPPORTED_COMPLETION, model)
    return CompletionCall(
        model=body.model,
        params=_params(body, COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens),
        stream=body.stream,
        include_usage=_include_usage(body),
        prompts=_prompts(body.prompt),
    )


# Decoding ------------------------------------------------------------------------------------------------------


def _decode(raw: bytes, kind: type[_B], unsupported: dict[str, tuple[Any, ...]], model: str) -> _B:
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    given = {name: value for name, value in data.items() if value is not None}
    _check_model(given.get("model"), model)
    _check_choices(given.get("n"))
    _refuse_unsupported(given, unsupported, kind.__struct_fields__, "")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _shaped(str(error)) from None


def _check_model(asked: Any, served: str) -> None:
    """First of all checks: a caller at the wrong address should learn that, not what else is wrong."""
    if asked is None:
        raise invalid("model is missing", "model", "missing_parameter")
    if not isinstance(asked, str):
        raise invalid("model must be a string", "model", "invalid_type")
    if asked != served:
        raise ApiError(404, f"the model {asked[:200]!r} is not served here", code="model_not_found", param="model")


def _check_choices(n: Any) -> None:
    if n is not None and (not isinstance(n, int) or isinstance(n, bool)):
        raise invalid("n must be an integer", "n", "invalid_type")
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise invalid(f"n must be between 1 and {MAX_CHOICES}, got {n}", "n")


def _refuse_unsupported(
    given: dict[str, Any], unsupported: dict[str, tuple[Any, ...]], known: tuple[str, ...], prefix: str
) -> None:
    """Drop parameters that ask for nothing; refuse the rest of what is not supported or not known."""
    for name in [name for name in given if name not in known]:
        value = given.pop(name)
        if name not in unsupported:
            raise invalid(f"unknown parameter: {prefix}{name[:100]}", f"{prefix}{name[:100]}", "unknown_parameter")
        if not any(type(value) is type(neutral) and value == neutral for neutral in unsupported[name]):
            raise invalid(f"{prefix}{name} is not supported by this engine", f"{prefix}{name}", "unsupported_parameter")


def _shaped(text: str) -> ApiError:
    """msgspec's sentence, with its path turned into `param`."""
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    sentence = _PATH.sub("", text).replace("`", "")
    missing = re.search(r"missing required field (\w+)", sentence)
    if missing:
        name = f"{path}.{missing.group(1)}".lstrip(".")
        return invalid(f"{name} is missing", name, "missing_parameter")
    return invalid(f"{path or 'body'}: {sentence[:1].lower()}{sentence[1:]}", path or None, "invalid_type")


# Checking ------------------------------------------------------------------------------------------------------


def _message(index: int, message: dict[str, Any]) -> dict[str, str]:
    prefix = f"messages[{index}]."
    given = {name: value for name, value in message.items() if value is not None}
    _refuse_unsupported(given, _MESSAGE_IGNORABLE, ("role", "content"), prefix)
    role = given.get("role")
    if role is None:
        raise invalid(f"{prefix}role is missing", f"{prefix}role", "missing_parameter")
    if role in ("tool", "function"):
        raise invalid(f"role {role!r} is not supported by this engine", f"{prefix}role", "unsupported_parameter")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{prefix}role must be one of {', '.join(ROLES)}", f"{prefix}role")
    if "content" not in given:
        raise invalid(f"{prefix}content is missing", f"{prefix}content", "missing_parameter")
    return {"role": ROLES[role], "content": _content(given["content"], f"{prefix}content")}


def _content(content: Any, where: str) -> str:
    """Content as one string; a list of text parts is joined as it stands."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"{where} must be a string or a list of text parts", where, "invalid_type")
    texts: list[str] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise invalid(f'{place} must be {{"type": "text", "text": …}}', place, "invalid_type")
        if kind != "text":
            sentence = f"content of type {kind[:50]!r} is not supported by this engine"
            raise invalid(sentence, place, "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{place}.text must be a string", f"{place}.text", "invalid_type")
        texts.append(part["text"])
    return "".join(texts)


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


def _within(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise invalid(f"{name} must be between {low:g} and {high:g}, got {value:g}", name)
    return value


def _stops(body: _Body) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop may hold at most {MAX_STOPS} strings, got {len(stops)}", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return stops


def _params(body: _Body, max_tokens: int | None, limit_param: str = "max_tokens") -> SamplingParams:
    if max_tokens is not None and not 1 <= max_tokens <= MAX_INT:
        raise invalid(f"{limit_param} must be between 1 and {MAX_INT}, got {max_tokens:.6g}", limit_param)
    if len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    if not 0 <= body.min_tokens <= MAX_INT:
        raise invalid(f"min_tokens must be between 0 and {MAX_INT}", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=_within("temperature", body.temperature, 0.0, 2.0),
        top_k=0 if body.top_k == -1 else min(body.top_k, MAX_INT),
        top_p=_within("top_p", body.top_p, 0.0, 1.0),
        min_p=_within("min_p", body.min_p, 0.0, 1.0),
        presence_penalty=_within("presence_penalty", body.presence_penalty, -2.0, 2.0),
        frequency_penalty=_within("frequency_penalty", body.frequency_penalty, -2.0, 2.0),
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=_stops(body),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def _include_usage(body: _Body) -> bool:
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
