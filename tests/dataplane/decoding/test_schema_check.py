"""Schemas that the grammar engine would take and not hold to."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from dataplane.decoding.schema_check import BOUNDS, check_schema

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"type": "array", "items": [{"$ref": "#"}], "minItems": 1},
        {"type": "object", "properties": {"default": {"$ref": "#"}}, "required": ["default"]},
        {"type": ["object", "array"], "required": ["a"], "additionalProperties": {"$ref": "#"}, "minItems": 1}
        | {"items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"type": "string"}]}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": {"$ref": "#/$defs/a"}}},
    ],
    ids=str,
)
def test_what_asks_for_itself_without_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no finite text"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "type": ["object", "null"]}}},
        {"$ref": "#/$defs/list", "$defs": {"list": {"anyOf": [{"const": None}, {**NODE, "required": ["value"]}]}}},
        {"const": {"$ref": "#", "type": "object", "required": ["a"]}},
        {"$ref": "#/nowhere"},
        {"type": "object", "required": ["a"], "patternProperties": {"^a$": {"type": "string"}}}
        | {"additionalProperties": {"$ref": "#"}},
    ],
    ids=str,
)
def test_what_can_end_is_not(schema: dict[str, Any]) -> None:
    check_schema(schema)


class Bytes:
    """A vocabulary of bytes, for the engine itself."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def bytewise() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257, eos_token=[256])


def engine_takes(schema: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(bytewise(), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    return not matcher.is_error() and matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


VALUES = (-2, -1.5, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2)


@pytest.mark.parametrize("excluded", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize(("low", "high"), list(itertools.combinations(VALUES, 2)))
def test_of_numbers_between_bounds_only_those_are_let_through_that_are_in_them(
    low: float, high: float, excluded: tuple[bool, bool]
) -> None:
    names = ("exclusiveMinimum" if excluded[0] else "minimum", "exclusiveMaximum" if excluded[1] else "maximum")
    schema = {"type": "number", names[0]: low, names[1]: high}
    inside = [value for value in VALUES if (low < value < high) or value in excluded_not(low, high, excluded)]
    try:
        check_schema(schema)
    except ValueError:
        outside = [json.dumps(value) for value in VALUES if value not in inside] + ["-0"] * (0 not in inside)
        assert any(engine_takes(schema, text) for text in outside)
        return
    assert [value for value in VALUES if engine_takes(schema, json.dumps(value))] == inside


def excluded_not(low: float, high: float, excluded: tuple[bool, bool]) -> list[float]:
    """The bounds that belong to the range."""
    return [bound for bound, out in zip((low, high), excluded, strict=True) if not out]


def test_bounds_count_together_wherever_they_stand() -> None:
    for schema in (
        {"allOf": [{"type": "number", "exclusiveMinimum": 1}, {"maximum": 1.5}]},
        {"$ref": "#/$defs/low", "maximum": 1.5, "$defs": {"low": {"type": "number", "exclusiveMinimum": 1}}},
    ):
        with pytest.raises(ValueError, match="exclusiveMinimum at # cannot be enforced"):
            check_schema(schema)
    check_schema({"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5})
    check_schema({"minimum": True, "exclusiveMinimum": "0", "allOf": 3, "$ref": 5, "required": "a", "minItems": "x"})


@pytest.mark.parametrize(("name", "sign"), [(name, 1 - 2 * ("ax" in name)) for name in sorted(BOUNDS)])
def test_bounds_of_more_than_64_bits_are_refused_by_name_where_they_would_let_anything_in(name: str, sign: int) -> None:
    check_schema({"type": "integer", name: sign * (2**63 - 1)})
    check_schema({"type": "integer", name: -sign * (2**64 - 1)})
    with pytest.raises(ValueError, match=f"^{name} at #/items is beyond 64 bits"):
        check_schema({"items": {"type": "integer", name: sign * 2**63}})


X = {"exclusiveMinimum": 0}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
        {"type": "number", "maximum": 0, "exclusiveMaximum": True, "minimum": -0.5},
        {"properties": {"default": {"type": "number", "maximum": 0.5, **X}}},
        {"type": "number", **X, "anyOf": [{"maximum": 0.5}, {"maximum": 0.25}]},
        {"type": "number", **X, "oneOf": [{"maximum": 5}, {"maximum": 0.25}]},
        {"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"anyOf": [X]}}},
        {"properties": {"a": {"type": "number", **X}}, "patternProperties": {"^a": {"maximum": 0.5}}},
    ],
    ids=str,
)
def test_an_excluded_bound_that_would_be_let_in_is_found_wherever_its_other_bound_stands(
    schema: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="cannot be enforced"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [X, {"maximum": 0.5}]},
        {"x-low": {"minimum": 10**30}, "const": {"maximum": -(10**30)}},
        {"properties": {"minimum": {"type": "number"}, "exclusiveMinimum": {"type": "boolean"}}},
        {"$ref": "#/items/²"},
    ],
    ids=str,
)
def test_what_only_looks_like_such_a_bound_is_let_be(schema: dict[str, Any]) -> None:
    check_schema(schema)


@pytest.mark.parametrize("order", [1, -1])
def test_long_chains_of_definitions_are_settled_in_one_pass_in_whatever_order_they_stand(order: int) -> None:
    link = {f"d{n}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{n - 1}"}}} for n in range(1, 600)}
    for definition in link.values():
        definition["required"] = ["n"]
    defs = {"d0": {"type": "string"}, **link}
    check_schema({"$ref": "#/$defs/d599", "$defs": dict(list(defs.items())[::order])})
    with pytest.raises(ValueError, match="no finite text"):
        check_schema({"$ref": "#/$defs/d599", "$defs": {**defs, "d0": {"$ref": "#/$defs/d599"}}})


def test_what_leads_to_too_many_places_is_refused_and_what_only_looks_so_is_not() -> None:
    twice = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 20}}, "allOf": [{"$ref": "#/$defs/a"}] * 20}
    with pytest.raises(ValueError, match="no finite text"):
        check_schema(twice)
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1000)}
    check_schema({"$ref": "#/$defs/d0", "$defs": {**chain, "d1000": {"type": "string"}}})
    many = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{m}"} for m in range(60)]} for n in range(60)}
    with pytest.raises(ValueError, match=r"too many places|no finite text"):
        check_schema({"$ref": "#/$defs/d0", "$defs": many})


@pytest.mark.parametrize("bound", ["1e400", "-1e400", "NaN", "1" + "0" * 400])
def test_numbers_no_machine_holds_do_no_harm(bound: str) -> None:
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        for text in (f'{{"{name}": {bound}}}', f'{{"$ref": "#/$defs/a", "$defs": {{"a": {{"{name}": {bound}}}}}}}'):
            try:
                check_schema(json.loads(text))
            except ValueError as error:
                assert "64 bits" in str(error) or "cannot be enforced" in str(error)
