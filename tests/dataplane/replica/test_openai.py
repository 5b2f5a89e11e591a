"""What an OpenAI client may send: accepted as documented, or refused by name; never ignored silently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.api_error import ApiError
from dataplane.openai import COMPLETION_MAX_TOKENS, parse_chat, parse_completion
from dataplane.protocol import encode

MODEL = "smollm2-135m-instruct"
USER = {"role": "user", "content": "Hello"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [USER], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "Once", **fields}).encode()


def refused(raw: bytes, *, of: Any = parse_chat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        of(raw, MODEL)
    error = caught.value
    body = json.loads(error.body())["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    assert "Traceback" not in body["message"]
    return error


BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_parameter"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_parameter"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
        "unsupported_parameter",
    ),
    ({"messages": [{**USER, "name": "bob"}]}, "messages[0].name", "unsupported_parameter"),
    ({"messages": [{**USER, "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls", "unsupported_parameter"),
    ({"messages": [{**USER, "mood": "grim"}]}, "messages[0].mood", "unknown_parameter"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**40}, "max_tokens", "invalid_value"),
    ({"max_tokens": "10"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": -5}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
    ({"temperature": 9}, "temperature", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": -1}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"stop": "x" * 1000}, "stop", "invalid_value"),
    ({"stop": 7}, "stop", "invalid_type"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options", "invalid_type"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    ({"logprobs": True}, "logprobs", "unsupported_parameter"),
    ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages", "invalid_value"),
    ({"prompt": "x"}, "prompt", "unknown_parameter"),
    ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHAT, ids=lambda value: str(value)[:40])
def test_chat_refuses_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(chat(**fields))
    assert (error.status, error.param, error.code) == (400, param, code)
    assert error.type == "invalid_request_error"


BAD_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing_parameter"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [[]]}, "prompt", "invalid_type"),
    ({"prompt": [True, False]}, "prompt", "invalid_type"),
    ({"prompt": {"text": "x"}}, "prompt", "invalid_type"),
    ({"prompt": ["x"] * 65}, "prompt", "invalid_value"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"best_of": 3}, "best_of", "unsupported_parameter"),
    ({"logprobs": 0}, "logprobs", "unsupported_parameter"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"max_completion_tokens": 3}, "max_completion_tokens", "unknown_parameter"),
    ({"messages": []}, "messages", "unknown_parameter"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_COMPLETION, ids=lambda value: str(value)[:40])
def test_completions_refuse_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(completion(**fields), of=parse_completion)
    assert (error.status, error.param, error.code) == (400, param, code)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"text"', b'{"model": }', b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"{}{}"],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    error = refused(raw)
    assert (error.status, error.code) == (400, "invalid_json")


def test_an_unknown_model_is_404_before_anything_else_is_looked_at() -> None:
    error = refused(json.dumps({"model": "gpt-9", "messages": []}).encode())
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(("model", "code"), [(None, "missing_parameter"), (5, "invalid_type")])
def test_a_missing_or_odd_model_is_named(model: Any, code: str) -> None:
    error = refused(chat(model=model))
    assert (error.status, error.param, error.code) == (400, "model", code)


def test_values_that_ask_for_nothing_are_accepted() -> None:
    call = parse_chat(
        chat(
            n=1,
            logprobs=False,
            tools=[],
            tool_choice="auto",
            response_format={"type": "text"},
            logit_bias={},
            functions=None,
            seed=None,
            stop=None,
            user="somebody",
            store=False,
        ),
        MODEL,
    )
    assert call.messages == [USER]


def test_all_sampling_parameters_arrive() -> None:
    call = parse_chat(
        chat(
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=1,
            frequency_penalty=-1,
            seed=11,
            stop=["END", "STOP"],
            top_k=40,
            min_p=0.1,
            repetition_penalty=1.2,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=[5, 6],
        ),
        MODEL,
    )
    params = call.params
    assert params.max_tokens == 7
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.2)
    assert (params.seed, params.stop, params.stop_token_ids) == (11, ("END", "STOP"), (5, 6))
    assert (params.min_tokens, params.ignore_eos) == (2, True)


def test_defaults_are_openais() -> None:
    assert parse_chat(chat(), MODEL).params.max_tokens is None
    assert parse_completion(completion(), MODEL).params.max_tokens == COMPLETION_MAX_TOKENS == 16
    assert parse_chat(chat(), MODEL).params.temperature == 1.0
    assert parse_chat(chat(top_k=-1), MODEL).params.top_k == 0


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    call = parse_chat(
        chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]), MODEL
    )
    assert call.messages == [{"role": "system", "content": "Be brief."}, USER]


def test_an_assistant_message_as_the_client_library_returns_it_is_accepted() -> None:
    answer = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert parse_chat(chat(messages=[USER, answer, USER]), MODEL).messages[1] == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", ["Once"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: list[Any]) -> None:
    assert parse_completion(completion(prompt=prompt), MODEL).prompts == expected


def test_stream_options() -> None:
    call = parse_chat(chat(stream=True, stream_options={"include_usage": True}), MODEL)
    assert call.stream
    assert call.include_usage
    assert not parse_chat(chat(stream=True), MODEL).include_usage


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["messages", "prompt", "max_tokens", "temperature", "seed", "stop", "top_k", "n", "stream", "stream_options",
     "stop_token_ids", "min_tokens", "logprobs", "tools", "user"]
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=6), st.booleans())
def test_any_json_is_either_a_call_that_fits_the_wire_or_a_shaped_error(fields: dict[str, Any], is_chat: bool) -> None:
    raw = chat(**fields) if is_chat else completion(**fields)
    try:
        call = (parse_chat if is_chat else parse_completion)(raw, MODEL)
    except ApiError as error:
        assert error.status == 400
        assert json.loads(error.body())["error"]["code"]
    else:
        if call.params.seed is None or -(2**63) <= call.params.seed < 2**63:
            encode(call.params)
