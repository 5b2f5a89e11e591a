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


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_parameter"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_parameter"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_parameter"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id", "unsupported_parameter"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls", "invalid_type"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "missing_parameter"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "missing_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "invalid_value",
    ),
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
    ({"n": 10**40}, "n", "invalid_value"),
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
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": ["f"]}, "tools[0]", "invalid_type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "unknown_parameter"),
    ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict", "invalid_type"),
    ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters", "invalid_type"),
    ({"tools": [tool("f"), tool("f")]}, "tools", "invalid_value"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice", "invalid_value"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice.function", "invalid_type"),
    ({"tools": [tool("f")], "response_format": {"type": "json_object"}}, "response_format", "invalid_value"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "unknown_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "invalid_type",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_parameter",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "invalid_type"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "invalid_type"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_type"),
    ({"structured_outputs": {"choice": [3]}}, "structured_outputs.choice", "invalid_type"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern", "unknown_parameter"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "invalid_value",
    ),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"5": "much"}}, "logit_bias[...]", "invalid_type"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": -101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"005": 1, "5": 2}}, "logit_bias", "invalid_value"),
    ({"bad_words": "x"}, "bad_words", "invalid_type"),
    ({"bad_words": [" "]}, "bad_words", "invalid_value"),
    ({"bad_words": ["x"] * 65}, "bad_words", "invalid_value"),
    ({"best_of": 2}, "best_of", "unknown_parameter"),
    ({"echo": True}, "echo", "unknown_parameter"),
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


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"temperature": 2.0000001}, "between 0 and 2, got 2.0000001"),
        ({"temperature": 9}, "between 0 and 2, got 9"),
        ({"top_p": 1 + 2**-52}, "between 0 and 1, got 1.0000000000000002"),
        ({"logit_bias": {"5": 100.0000001}}, "between -100 and 100, got 100.0000001 for token 5"),
        ({"logit_bias": {"5": 1, "005": 1}}, "logit_bias names the token 5 twice"),
        ({"max_tokens": 2**31}, "between 1 and 2147483647, got 2147483648"),
        ({"n": 10**400}, f"between 1 and 128, got 1{'0' * 39}… (401 characters)"),
        ({"prompt_logprobs": 10**400}, f"between 0 and 20, got 1{'0' * 39}… (401 characters)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_number_out_of_range_is_told_as_it_is(fields: dict[str, Any], end: str) -> None:
    assert json.loads(refused(chat(**fields)).body())["error"]["message"].endswith(end)


BAD_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing_parameter"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [[]]}, "prompt", "invalid_type"),
    ({"prompt": [True, False]}, "prompt", "invalid_type"),
    ({"prompt": {"text": "x"}}, "prompt", "invalid_type"),
    ({"prompt": ["x"] * 65}, "prompt", "invalid_value"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"best_of": 0}, "best_of", "invalid_value"),
    ({"best_of": 21}, "best_of", "invalid_value"),
    ({"best_of": 10**400}, "best_of", "invalid_value"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 6}, "logprobs", "invalid_value"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"tools": []}, "tools", "unknown_parameter"),
    ({"top_logprobs": 1}, "top_logprobs", "unknown_parameter"),
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


def test_choices_and_logprobs_of_a_chat_arrive() -> None:
    call = parse_chat(chat(n=3, logprobs=True, top_logprobs=5, logit_bias={"7": -100, "8": 2.5}), MODEL)
    assert (call.n, call.samples, call.shows_logprobs) == (3, 3, True)
    assert call.params.logprobs == 5
    assert call.params.logit_bias == {7: -100.0, 8: 2.5}
    assert parse_chat(chat(logprobs=True), MODEL).params.logprobs == 0
    assert parse_chat(chat(), MODEL).params.logprobs is None
    asking = parse_chat(chat(prompt_logprobs=2), MODEL)
    assert (asking.params.prompt_logprobs, asking.shows_prompt_logprobs) == (2, True)


def test_best_of_asks_for_logprobs_to_choose_by_and_does_not_show_them() -> None:
    call = parse_completion(completion(n=2, best_of=4), MODEL)
    assert (call.n, call.samples, call.params.logprobs, call.shows_logprobs) == (2, 4, 0, False)
    shown = parse_completion(completion(best_of=3, logprobs=2), MODEL)
    assert (shown.samples, shown.params.logprobs, shown.shows_logprobs) == (3, 2, True)
    same = parse_completion(completion(n=2, best_of=2, stream=True), MODEL)
    assert (same.samples, same.params.logprobs) == (2, None)


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    call = parse_completion(completion(echo=True, logprobs=1), MODEL)
    assert (call.echo, call.params.logprobs, call.params.prompt_logprobs) == (True, 1, 1)
    assert not call.shows_prompt_logprobs
    assert parse_completion(completion(echo=True), MODEL).params.prompt_logprobs is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"structured_outputs": {"regex": "[0-9]+", "json_object": False}}, "regex", "[0-9]+"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"choice": ["yes", "nö"]}}, "choice", '["yes", "nö"]'),
    ],
)
def test_the_form_of_the_answer_becomes_a_grammar(fields: dict[str, Any], kind: str, text: str) -> None:
    for call in (parse_chat(chat(**fields), MODEL), parse_completion(completion(**fields), MODEL)):
        assert call.params.grammar is not None
        assert (call.params.grammar.kind, call.params.grammar.text) == (kind, text)
        assert call.grammar_param == next(iter(fields))


def test_tools_arrive() -> None:
    weather = tool("weather", description="The weather", parameters=SCHEMA, strict=True)
    call = parse_chat(chat(tools=[weather, tool("clock")], parallel_tool_calls=False), MODEL)
    assert [known.name for known in call.tools.tools] == ["weather", "clock"]
    assert call.tools.tools[0].parameters == SCHEMA
    assert call.tools.tools[0].strict
    assert (call.tools.choice, call.tools.must, call.tools.parallel) == ("auto", False, False)
    assert parse_chat(chat(tools=[weather], tool_choice="required"), MODEL).tools.must
    chosen = parse_chat(chat(tools=[weather, tool("clock")], tool_choice=named("clock")), MODEL).tools
    assert chosen.must
    assert [offered.name for offered in chosen.offered()] == ["clock"]
    assert parse_chat(chat(tools=[weather], tool_choice="none"), MODEL).tools.tools == ()


def test_calls_and_results_of_tools_arrive_as_templates_take_them() -> None:
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    call = parse_chat(chat(messages=[USER, asked, {"role": "tool", "tool_call_id": "c", "content": "22"}]), MODEL)
    expected = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert call.messages[1] == {"role": "assistant", "content": "", "tool_calls": [expected]}
    assert call.messages[2] == {"role": "tool", "tool_call_id": "c", "content": "22"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["messages", "prompt", "max_tokens", "temperature", "seed", "stop", "top_k", "n", "stream", "stream_options",
     "stop_token_ids", "min_tokens", "logprobs", "tools", "user", "best_of", "echo", "top_logprobs", "logit_bias",
     "bad_words", "tool_choice", "response_format", "structured_outputs", "prompt_logprobs"]
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
