"""Tools: taught, held to a grammar, and found again in what the model writes, whatever the chunks."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.chat_template import ChatTemplate
from dataplane.decoding.grammar import GrammarCompiler
from dataplane.protocol import Grammar
from dataplane.tool_calls import ToolCall, ToolCallScanner
from dataplane.tools import Tool, ToolStyle, ToolUse, call_grammar, taught
from tests.dataplane.replica.harness import smollm2_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
WEATHER = Tool("weather", "The weather of a city", CITY)
CLOCK = Tool("clock")
BOTH = ToolUse(tools=(WEATHER, CLOCK))
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = ToolCall("weather", '{"city": "Paris"}')


def read(text: str, cuts: list[int] | None = None, use: ToolUse = BOTH, style: ToolStyle = ToolStyle.TAGS) -> list[Any]:
    """The pieces of `text` given in chunks, neighbouring texts joined."""
    scanner, pieces = ToolCallScanner(use, style), []
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts or []}), len(text)]
    for start, end in itertools.pairwise(edges):
        pieces += scanner.push(text[start:end])
    pieces += scanner.flush()
    joined: list[Any] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    assert scanner.calls == sum(isinstance(piece, ToolCall) for piece in pieces)
    return joined


UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
ODD = '<tool_call>{"name": "clock", "arguments": 3}</tool_call>'
NO_JSON = [
    f'<tool_call>{{"name": "clock", "arguments": {{"x": [{number}]}}}}</tool_call>'
    for number in ("NaN", "Infinity", "-Infinity", "1e999")
]
TAGGED: list[tuple[str, list[Any]]] = [
    ("Just text.\n", ["Just text.\n"]),
    ("  \n", ["  \n"]),
    ("", []),
    (f"<tool_call>\n{PARIS}\n</tool_call>", [CALL]),
    (f"Let me see.\n\n<tool_call>{PARIS}</tool_call>\n", ["Let me see.", CALL]),
    (f"<tool_call>{PARIS}</tool_call>\n<tool_call>{PARIS}</tool_call>", [CALL, CALL]),
    (f"<tool_call>[{PARIS}, {PARIS}]</tool_call>", [CALL, CALL]),
    ("<tool_call>[]</tool_call>", []),
    (f"<tool_call>\n{PARIS}\n", [CALL]),
    ('<tool_call>{"name": "clock"}</tool_call> done', [ToolCall("clock", "{}"), " done"]),
    ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', [ToolCall("clock", "{}")]),
    (UNKNOWN, [UNKNOWN]),
    *((text, [text]) for text in NO_JSON),
    ('<tool_call>{"name": ["x"]}</tool_call>', ['<tool_call>{"name": ["x"]}</tool_call>']),
    (ODD, [ODD]),
    ("a <tool_call>{broken</tool_call> b", ["a <tool_call>{broken</tool_call> b"]),
    ("a <tool_call>{brok", ["a <tool_call>{brok"]),
    ("a <tool_ca", ["a <tool_ca"]),
    ("<tool_call>" + "[" * 100_000, ["<tool_call>" + "[" * 100_000]),
    ("x < y and <tool y", ["x < y and <tool y"]),
    (f"<tool_call>\n{PARIS}\n</tool", [CALL]),
    (f'<tool_call>{PARIS}</tool_call>\n<tool_call>\n{{"', [CALL]),
    (f"<tool_call>{PARIS}</tool_call>\n<tool_call>", [CALL]),
    (f"<tool_call>{PARIS}</tool_call>\n<tool_c", [CALL]),
    (f"<tool_call>{PARIS}</tool_call> a\n<tool_call>{{", [CALL, " a"]),
    (f"<tool_call>{PARIS}</tool_call> a <", [CALL, " a <"]),
    (f"<tool_call>{PARIS};\n{PARIS[:20]}", [CALL]),
    (f"<tool_call>{PARIS[:20]}", [f"<tool_call>{PARIS[:20]}"]),
    (f"<tool_call>{PARIS} so", [f"<tool_call>{PARIS} so"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TAGGED, ids=lambda value: str(value)[:40])
def test_calls_between_tags(text: str, expected: list[Any]) -> None:
    assert read(text) == expected


@settings(deadline=None)
@given(st.sampled_from([case for case in TAGGED if len(case[0]) < 1000]), st.lists(st.integers(0, 10_000), max_size=30))
def test_chunks_do_not_matter(case: tuple[str, list[Any]], cuts: list[int]) -> None:
    assert read(case[0], cuts) == case[1]


@pytest.mark.parametrize("text", ["\\ud83d", "a\\udc00é", "\\ude00\\ud83d"])
def test_half_a_surrogate_pair_stays_escaped(text: str) -> None:
    (call,) = read(f'<tool_call>{{"name": "clock", "arguments": {{"{text}": ["{text}"]}}}}</tool_call>')
    assert call == ToolCall("clock", f'{{"{text}": ["{text}"]}}')
    assert msgspec.json.decode(msgspec.json.encode(call), type=ToolCall) == call
    whole = json.dumps("\U0001f600")
    assert read(f'<tool_call>{{"name": "clock", "arguments": {{"x": {whole}}}}}</tool_call>') == [
        ToolCall("clock", '{"x": "\U0001f600"}')
    ]


def test_text_that_is_no_call_is_not_held_back() -> None:
    scanner = ToolCallScanner(BOTH, ToolStyle.TAGS)
    assert scanner.push("Hello") == ["Hello"]
    assert scanner.push(" <") == []
    assert scanner.push("b> x") == [" <b> x"]


BARE: list[tuple[str, list[Any]]] = [
    ('{"name": "weather", "parameters": {"city": "Paris"}}', [CALL]),
    (' {"name": "clock", "parameters": {}}; {"name": "clock"}', [ToolCall("clock", "{}")] * 2),
    ('{"answer": 3}', ['{"answer": 3}']),
    ('{"name": "clock"}; {"name": "wea', [ToolCall("clock", "{}")]),
    ('{"name": "clock"} more', ['{"name": "clock"} more']),
    ('{"name": "clo', ['{"name": "clo']),
    ('Text {"name": "clock"} more', ['Text {"name": "clock"} more']),
    ("", []),
    ("  ", ["  "]),
]


@pytest.mark.parametrize(("text", "expected"), BARE, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("cuts", [[], [1, 2, 5, 9, 20]])
def test_a_bare_answer_is_calls_from_its_start_or_not_at_all(text: str, expected: list[Any], cuts: list[int]) -> None:
    assert read(text, cuts, style=ToolStyle.BARE) == expected


def test_without_parallel_calls_the_first_counts() -> None:
    use = ToolUse(tools=(WEATHER, CLOCK), parallel=False)
    assert read(f"<tool_call>{PARIS}</tool_call><tool_call>{PARIS}</tool_call>", use=use) == [CALL]
    assert read(f"<tool_call>[{PARIS}, {PARIS}]</tool_call>", use=use) == [CALL]


def test_a_named_tool_is_the_only_one_offered() -> None:
    use = ToolUse(tools=(WEATHER, CLOCK), choice="clock", named=True)
    assert read(f"<tool_call>{PARIS}</tool_call>", use=use) == [f"<tool_call>{PARIS}</tool_call>"]


# Grammar ---------------------------------------------------------------------------------------------------------


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer, smollm2_tokenizer().vocab_size)


def holds(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    state = compiler().compile(grammar).start()
    for token in smollm2_tokenizer().encode(text, add_special_tokens=False):
        try:
            state.accept(token)
        except Exception:
            return False
    return state.complete


CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
PARIS_CALL = f"<tool_call>\n{PARIS}\n</tool_call>"
BERLIN_CALL = PARIS_CALL.replace("Paris", "Berlin")


def test_required_is_calls_that_fit_their_schemas_and_nothing_else() -> None:
    use = ToolUse(tools=(WEATHER, CLOCK), choice="required")
    grammar = call_grammar(use, ToolStyle.UNTAUGHT)
    for text in (PARIS_CALL, CLOCK_CALL, f"{PARIS_CALL}\n{CLOCK_CALL}"):
        assert holds(grammar, text)
        assert all(isinstance(piece, ToolCall) for piece in read(text, use=use))
    for text in ("", "Hello", BERLIN_CALL, PARIS_CALL + "x", '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n'):
        assert not holds(grammar, text)
    single = call_grammar(ToolUse(tools=(CLOCK,), choice="required", parallel=False), ToolStyle.TAGS)
    assert holds(single, CLOCK_CALL)
    assert not holds(single, f"{CLOCK_CALL}\n{CLOCK_CALL}")


def test_a_named_tool_is_called() -> None:
    grammar = call_grammar(ToolUse(tools=(WEATHER, CLOCK), choice="clock", named=True), ToolStyle.TAGS)
    assert holds(grammar, CLOCK_CALL)
    assert not holds(grammar, PARIS_CALL)


def test_auto_is_free_unless_a_tool_is_strict_and_then_only_its_calls_are_held() -> None:
    assert call_grammar(BOTH, ToolStyle.TAGS) is None
    strict = call_grammar(ToolUse(tools=(Tool("weather", "", CITY, strict=True), CLOCK)), ToolStyle.TAGS)
    for text in ("", "Hello, world.", f"Hm. {PARIS_CALL}", f"{PARIS_CALL}\nand {PARIS_CALL} so"):
        assert holds(strict, text), text
    assert holds(strict, CLOCK_CALL.replace("{}", '{"anything": 1}'))
    assert not holds(strict, BERLIN_CALL)


def test_bare_calls_are_held_too() -> None:
    call = '{"name": "weather", "parameters": {"city": "Rome"}}'
    must = call_grammar(ToolUse(tools=(WEATHER,), choice="required"), ToolStyle.BARE)
    assert holds(must, f"{call}; {call}")
    assert not holds(must, "Hello")
    strict = call_grammar(ToolUse(tools=(Tool("weather", "", CITY, strict=True),)), ToolStyle.BARE)
    for text in ("", "Hello", call):
        assert holds(strict, text), text
    assert not holds(strict, call.replace("Rome", "Oslo"))


# Template --------------------------------------------------------------------------------------------------------

QWEN = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>{% endif %}'
)
LLAMA = '{% if tools is not none %}{"name": function name, "parameters": dictionary}{{ tools[0] | tojson }}{% endif %}'


@pytest.mark.parametrize(
    ("source", "style"),
    [
        (QWEN, ToolStyle.TAGS),
        (LLAMA, ToolStyle.BARE),
        ("{% for tool in tools %}[TOOL_CALLS]{% endfor %}", ToolStyle.UNKNOWN),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ToolStyle.UNTAUGHT),
    ],
)
def test_the_style_is_read_off_the_template(source: str, style: ToolStyle) -> None:
    assert ChatTemplate(source, {}).tool_style is style


def test_smollm2_is_taught_in_its_system_message() -> None:
    assert smollm2_tokenizer().tool_style is ToolStyle.UNTAUGHT
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "22 C", "tool_call_id": "c1"},
    ]
    prompt = smollm2_tokenizer().render_chat(taught(messages, BOTH))
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(WEATHER.described()) in prompt
    assert f"<|im_start|>assistant\n{PARIS_CALL}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\n22 C\n</tool_response><|im_end|>" in prompt
    assert read(PARIS_CALL) == [CALL], "what the model sees of a call is read back as that call"
    without = taught(messages[1:2], BOTH)
    assert [message["role"] for message in without] == ["system", "user"]
    assert taught(messages[:2], ToolUse()) == messages[:2]
