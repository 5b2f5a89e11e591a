"""A request's worst case, read from its body."""

from __future__ import annotations

import json

import pytest

from controlplane.admission.charges import MOST
from controlplane.errors import InvalidRequestError
from controlplane.gateway.body import read_inference_body
from controlplane.gateway.size import TEMPLATE_TOKENS, TOOLS_TEMPLATE_TOKENS, Size

CONTEXT = 4096


def size_of(**members: object) -> Size:
    return read_inference_body(json.dumps({"model": "m", **members}).encode()).size


@pytest.mark.parametrize("text", ["", "plain words", "Ünïcödé", "漢字 and 🦀", 'quotes " and \\ and \n', "x" * 3000])
def test_no_text_has_more_tokens_than_its_bytes(text: str) -> None:
    """The smallest tokens there are stand for one byte each."""
    assert size_of(prompt=text).input_tokens(CONTEXT) >= len(text.encode())
    asked = size_of(messages=[{"role": "user", "content": text}])
    assert asked.input_tokens(CONTEXT) >= min(CONTEXT, len(text.encode()) + TEMPLATE_TOKENS)


def test_tools_and_what_templates_say_of_them_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "d" * 500}}]
    bare, with_tools = size_of(messages=[]), size_of(messages=[], tools=tools)
    assert with_tools.prompt - bare.prompt == len(json.dumps(tools)) + TOOLS_TEMPLATE_TOKENS


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [
        ([1, 2, 3], 3, 1),
        ([[1, 2, 3], [4]], 4, 2),
        ([7], 1, 1),
        (["ab", "c"], len('["ab", "c"]'), 2),
        ([], 1, 1),
        ([["a"], [1]], len('[["a"], [1]]'), 2),
        ({"a": 1}, len('{"a": 1}'), 1),
    ],
)
def test_token_ids_count_as_many_as_they_are(prompt: object, tokens: int, prompts: int) -> None:
    asked = size_of(prompt=prompt, max_tokens=10)
    assert (asked.prompt, asked.prompts) == (tokens, prompts)
    assert asked.output_tokens(CONTEXT) == 10 * prompts


@pytest.mark.parametrize(
    ("members", "output"),
    [
        ({"messages": []}, CONTEXT),
        ({"messages": [], "max_tokens": 7}, 7),
        ({"messages": [], "max_completion_tokens": 8}, 8),
        ({"messages": [], "max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"messages": [], "max_tokens": None}, CONTEXT),
        ({"messages": [], "max_tokens": "7"}, CONTEXT),
        ({"messages": [], "max_tokens": 7.0}, 7),
        ({"messages": [], "max_tokens": 7.5}, CONTEXT),
        ({"messages": [], "max_tokens": True}, CONTEXT),
        ({"messages": [], "max_tokens": 10**30}, CONTEXT),
        ({"messages": [], "max_tokens": 0}, 0),
        ({"messages": [], "max_tokens": -1}, CONTEXT),
        ({"messages": [], "max_tokens": -1, "max_completion_tokens": 8}, CONTEXT),
        ({"prompt": "a", "max_tokens": -2.0}, CONTEXT),
        ({"messages": [], "max_tokens": 7, "n": 3}, 21),
        ({"messages": [], "n": 2}, 2 * CONTEXT),
        ({"prompt": "a"}, 16),
        ({"prompt": "a", "best_of": 4, "n": 2}, 64),
        ({"prompt": ["a", "b"], "max_tokens": 5, "n": 2}, 20),
        ({"prompt": "a", "max_tokens": None, "n": None}, 16),
        ({"prompt": "a", "n": 0}, 16),
    ],
)
def test_every_answer_may_be_as_long_as_was_asked_for(members: dict[str, object], output: int) -> None:
    assert size_of(**members).output_tokens(CONTEXT) == output


def test_a_prompt_takes_no_more_than_the_context() -> None:
    assert size_of(messages=[{"role": "user", "content": "x" * 9999}]).input_tokens(CONTEXT) == CONTEXT
    assert size_of(prompt=["x" * 9999, "y" * 9999]).input_tokens(CONTEXT) == 2 * CONTEXT


def test_amounts_stay_within_what_is_counted() -> None:
    asked = size_of(prompt="a", n=2**62, max_tokens=2**40)
    assert asked.output_tokens(2**31) == MOST


@pytest.mark.parametrize("name", ["n", "best_of"])
@pytest.mark.parametrize("value", ["2", 2.5, [], {}, True])
def test_a_number_of_answers_that_is_none_passes_only_where_nobody_counts(name: str, value: object) -> None:
    asked = size_of(prompt="a", **{name: value})
    assert asked.input_tokens(CONTEXT) > 0
    with pytest.raises(InvalidRequestError) as refused:
        asked.output_tokens(CONTEXT)
    assert refused.value.param == name
