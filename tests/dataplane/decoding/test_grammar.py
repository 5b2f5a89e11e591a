"""Structured output: what the mask allows is exactly what the grammar has, and a bad grammar is refused in bounds."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from dataplane.config import find_model
from dataplane.decoding.grammar import (
    LIMITS,
    MAX_TEXT,
    GrammarCompiler,
    GrammarError,
    GrammarState,
    mask_words,
    unpack,
)
from dataplane.protocol import Grammar, GrammarKind
from dataplane.request import RequestError
from dataplane.tokenizer import Tokenizer, load_tokenizer

JSON = GrammarKind.JSON_SCHEMA
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2")[0])


@cache
def compiler() -> GrammarCompiler:
    return make_compiler()


def make_compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, **{"vocab": tokenizer().vocab_size, **options})


def grammar(kind: GrammarKind, text: Any = "") -> Grammar:
    return Grammar(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


def start(kind: GrammarKind, text: Any = "") -> GrammarState:
    return compiler().compile(grammar(kind, text)).start()


def allowed(state: GrammarState, vocab: int | None = None) -> np.ndarray:
    vocab = vocab or tokenizer().vocab_size
    mask = np.zeros(mask_words(vocab), dtype=np.int32)
    state.fill(mask)
    return np.flatnonzero(unpack(mask, vocab))


def takes(state: GrammarState, text: str) -> bool:
    """Walk `text` token by token; whether the mask let it pass and it may end there."""
    for token in tokenizer().encode(text, add_special_tokens=False):
        if token not in allowed(state):
            return False
        state.accept(token)
    ends = set(tokenizer().eos_token_ids) <= set(allowed(state).tolist())
    assert ends == state.complete
    return ends


LANGUAGES: list[tuple[GrammarKind, Any, list[str], list[str]]] = [
    (
        GrammarKind.JSON_OBJECT,
        "",
        ['{"a": [1, 2.5e3, null]}', "{}", '{\n    "a": "é"\n}'],
        ["[1]", "1", '{"a": }', "{a: 1}"],
    ),
    (
        JSON,
        PERSON,
        ['{"name": "Ada Lovelace", "age": 36}', '{"name": "", "age": 0, "tags": ["a", "b"]}'],
        ['{"name": "Ada"}', '{"name": "Ada", "age": 151}', '{"name": "Ada", "age": 3, "x": 1}', '{"age": 3}'],
    ),
    (JSON, {"enum": ["é", 1, None]}, ['"é"', "1", "null"], ['"e"', "2"]),
    (JSON, {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"}, ['"AB12"'], ['"ab12"', '"AB"']),
    (
        JSON,
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        ["[[], [[]]]"],
        ["[1]", "[[]"],
    ),
    (GrammarKind.REGEX, r"[0-9]{4}-[0-9]{2}-[0-9]{2}", ["2024-03-01"], ["2024-3-01", "2024-03-01x", ""]),
    (GrammarKind.REGEX, r"^\d{3}$", ["123"], ["12", "^123$"]),
    (GrammarKind.REGEX, r"(x+x+)+y", ["xxxxxy"], ["xxxx"]),
    (
        GrammarKind.CHOICE,
        ["yes", "no", 'a"b\\n\n/', " é日本"],
        ["yes", "no", 'a"b\\n\n/', " é日本"],
        ["y", "yesno", ""],
    ),
    (
        GrammarKind.EBNF,
        'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"\n',
        ["1+(2-33)", "7"],
        ["1+", "()", "(1"],
    ),
    (GrammarKind.EBNF, 'start: "a" /[0-9]+/\n', ["a12"], ["a", "12"]),
    (GrammarKind.EBNF, 'start: "a ::= b"', ["a ::= b"], ["a", "b"]),
    (JSON, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1"], ["0", "1.5"]),
    (JSON, {"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 3}, ["2.5"], ["2", "3"]),
    (GrammarKind.CHOICE, [str(number) for number in range(1000, 2999)], ["1000", "2998"], ["999", "2999"]),
]


@pytest.mark.parametrize(("kind", "text", "inside", "outside"), LANGUAGES, ids=lambda value: str(value)[:30])
def test_the_mask_is_the_language(kind: GrammarKind, text: Any, inside: list[str], outside: list[str]) -> None:
    for sample in inside:
        assert takes(start(kind, text), sample), sample
    for sample in outside:
        assert not takes(start(kind, text), sample), sample


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_from_the_mask_is_a_text_of_the_schema(seed: int) -> None:
    """A model of pure noise, kept short by taking the end as soon as it is offered."""
    rng = np.random.default_rng(seed)
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 5, "maximum": 12}},
        "required": ["kind", "n"],
        "additionalProperties": False,
    }
    state, tokens = start(JSON, schema), []
    while not state.complete:
        tokens.append(int(rng.choice(allowed(state))))
        state.accept(tokens[-1])
    value = json.loads(tokenizer().decode(tokens))
    assert set(value) == {"kind", "n"}
    assert value["kind"] in ("x", "y")
    assert 5 <= value["n"] <= 12


def test_the_end_is_allowed_where_the_text_may_end_and_alone_where_it_must() -> None:
    eos = tokenizer().eos_token_ids[0]
    state = start(GrammarKind.REGEX, "ab{1,2}")
    assert eos not in allowed(state)
    for token in tokenizer().encode("ab", add_special_tokens=False):
        state.accept(token)
    assert eos in allowed(state)
    assert not state.finished
    (b,) = tokenizer().encode("b", add_special_tokens=False)
    state.accept(b)
    assert state.finished
    assert allowed(state).tolist() == [eos]
    # A step in flight may draw once more: it finds the end again, not an error.
    state.accept(eos)
    assert allowed(state).tolist() == [eos]
    state.accept(eos)


def test_no_special_token_passes_for_text() -> None:
    """`.*` has the characters of a marker in it, not the marker."""
    tokens, special = tokenizer().vocabulary()
    state = start(GrammarKind.REGEX, "(.|\n)*")
    inside = set(allowed(state).tolist())
    assert inside & set(special) == set(tokenizer().eos_token_ids)
    assert len(inside) > 0.9 * len(tokens)


def test_a_text_that_reads_like_a_special_token_is_spelt_out() -> None:
    """Only one text is left, and the model's own way to write it would be the marker."""
    special = set(tokenizer().vocabulary()[1])
    state, tokens = start(GrammarKind.CHOICE, ["<|im_start|>!"]), []
    while not state.finished:
        inside = set(allowed(state).tolist())
        assert not inside & special
        tokens.append(min(inside))
        state.accept(tokens[-1])
    assert tokenizer().decode(tokens) == "<|im_start|>!"


def test_forced_text_is_written_as_the_model_would() -> None:
    state, tokens = start(GrammarKind.CHOICE, ["a longer sentence of some words"]), []
    while not state.finished:
        (only,) = allowed(state).tolist()
        tokens.append(only)
        state.accept(only)
    assert tokens == tokenizer().encode("a longer sentence of some words")


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    compiled = compiler().compile(grammar(JSON, PERSON))
    tokens = tokenizer().encode('{"name": "Ada", "age": 3', add_special_tokens=False)
    straight = compiled.start()
    for token in tokens:
        straight.accept(token)
    resumed = compiled.start(tokens)
    assert allowed(resumed).tolist() == allowed(straight).tolist()
    with pytest.raises(GrammarError):
        compiled.start(tokenizer().encode("hello", add_special_tokens=False))


def test_sequences_of_one_grammar_do_not_touch_each_other() -> None:
    compiled = compiler().compile(grammar(GrammarKind.CHOICE, ["yes", "no"]))
    one, other = compiled.start(), compiled.start()
    before = allowed(other).tolist()
    for token in tokenizer().encode("yes", add_special_tokens=False):
        one.accept(token)
    assert one.finished
    assert allowed(other).tolist() == before


def test_a_model_wider_than_its_tokenizer_is_masked_to_the_end() -> None:
    vocab = tokenizer().vocab_size + 100
    state = make_compiler(vocab=vocab).compile(grammar(GrammarKind.REGEX, "(.|\n)*")).start()
    inside = allowed(state, vocab)
    assert inside.max() < tokenizer().vocab_size


REFUSED: list[tuple[GrammarKind, Any, str]] = [
    (JSON, "{", "Expecting"),
    (JSON, "[]", "must be an object"),
    (JSON, "false", "must be an object"),
    (JSON, {"type": "wizard"}, "wizard"),
    (JSON, {"type": "integer", "minimum": 5, "maximum": 3}, "greater than maximum"),
    (JSON, {"type": "object", "required": ["a"], "properties": {"a": False}}, "unsatisfiable"),
    (JSON, {"$ref": "#"}, "no finite text"),
    (JSON, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite text"),
    (JSON, {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum at # cannot be enforced"),
    (JSON, {"items": {"minimum": -1.5, "exclusiveMaximum": -1}}, "exclusiveMaximum at #/items cannot be enforced"),
    (JSON, {"type": "integer", "minimum": 2**63, "maximum": 2**63}, "minimum at # is beyond 64 bits"),
    (GrammarKind.CHOICE, [str(number) for number in range(2000)], "at most 1999"),
    (JSON, {"$ref": "http://example.com/x.json"}, "example.com"),
    (JSON, {"$ref": "file:///etc/passwd"}, "passwd"),
    (JSON, {"not": {"type": "string"}}, "not"),
    (JSON, {"type": "array", "uniqueItems": True}, "uniqueItems"),
    (JSON, {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems"),
    (JSON, {"type": "string", "format": "wizard"}, "wizard"),
    (GrammarKind.REGEX, "(abc", "unclosed"),
    (GrammarKind.REGEX, r"(a)\1", "invalid regex"),
    (GrammarKind.REGEX, "(?=a)a", "invalid regex"),
    (GrammarKind.EBNF, "root ::= (", "Expected"),
    (GrammarKind.EBNF, "root ::= missing", "missing"),
    (GrammarKind.EBNF, 'root ::= "a" root', "items"),
    (GrammarKind.EBNF, "nonsense", ""),
    (GrammarKind.EBNF, "", ""),
    (GrammarKind.CHOICE, [], "at least one"),
    (GrammarKind.CHOICE, [1], "string"),
    (GrammarKind.CHOICE, '["\\ud800"]', ""),
]


@pytest.mark.parametrize(("kind", "text", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_has_no_text_or_cannot_be_enforced_is_refused(kind: GrammarKind, text: Any, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler().compile(grammar(kind, text))
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "structured_outputs")
    assert why in caught.value.message
    assert len(caught.value.message) < 400


EXPLODING: list[tuple[GrammarKind, Any]] = [
    (GrammarKind.REGEX, "(a?){3000}a{3000}"),
    (GrammarKind.REGEX, "(" * 20_000 + "a" + ")" * 20_000),
    (GrammarKind.EBNF, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    (GrammarKind.EBNF, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    (GrammarKind.EBNF, "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"\n'),
    (JSON, {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(6)]} for i in range(14)]}),
    (JSON, {"allOf": [{"type": "string", "pattern": f"(.*{c}){{20}}"} for c in "abcdefghij"]}),
    (JSON, {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (101, 103, 107, 109, 113)]}),
    (JSON, {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}),
    (JSON, '{"items":' * 300 + "{}" + "}" * 300),
    (GrammarKind.REGEX, "a" * (MAX_TEXT + 1)),
]


@pytest.mark.parametrize(("kind", "text"), EXPLODING, ids=lambda value: str(value)[:40])
def test_what_explodes_is_refused_in_bounds(kind: GrammarKind, text: Any) -> None:
    compiler().compile(grammar(GrammarKind.JSON_OBJECT))
    started = time.process_time()
    with pytest.raises(RequestError):
        compiler().compile(grammar(kind, text))
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize(
    "expression", ["((a{1,100}){1,100}){1,100}", "(a|b)*a(a|b){40}", "([a-z]{0,1000}){1000}", "(.*a){50}.{5000}"]
)
def test_what_explodes_as_an_automaton_is_served_when_derivatives_bear_it(expression: str) -> None:
    """The bound is on work, not on how an expression looks."""
    state = start(GrammarKind.REGEX, expression)
    for _ in range(50):
        state.accept(int(allowed(state)[0]))


def test_a_place_that_takes_too_much_work_is_an_error_of_that_sequence() -> None:
    tight = LLParserLimits(step_lexer_fuel=20_000, step_max_items=LIMITS.step_max_items, verbose_errors=False)
    compiled = make_compiler(limits=tight).compile(grammar(GrammarKind.REGEX, "b(.*a.*c){30}[^q]{100}|a"))
    state = compiled.start()
    with pytest.raises(GrammarError):
        for _ in range(200):
            state.accept(int(allowed(state)[-1]))
    assert takes(compiled.start(), "a")


def test_a_grammar_is_compiled_once_and_so_is_a_refusal() -> None:
    own = make_compiler(kept=2)
    first = own.compile(grammar(GrammarKind.REGEX, "a"))
    assert own.compile(grammar(GrammarKind.REGEX, "a")) is first
    with pytest.raises(RequestError) as one:
        own.compile(grammar(GrammarKind.REGEX, "("))
    with pytest.raises(RequestError) as two:
        own.compile(grammar(GrammarKind.REGEX, "("))
    assert one.value is two.value
    own.compile(grammar(GrammarKind.REGEX, "c"))
    assert own.compile(grammar(GrammarKind.REGEX, "a")) is not first


def test_a_model_without_an_end_of_sequence_has_no_structured_output() -> None:
    class Endless:
        eos_token_ids: tuple[int, ...] = ()
        vocabulary = staticmethod(lambda: tokenizer().vocabulary())
        encode = staticmethod(lambda text, **options: tokenizer().encode(text, **options))

    with pytest.raises(RequestError, match="no end of sequence"):
        GrammarCompiler(Endless, tokenizer().vocab_size).compile(grammar(GrammarKind.JSON_OBJECT))


def test_unpack_reads_the_lowest_bit_first_and_cuts_to_the_vocabulary() -> None:
    masks = np.array([[1, 2], [-1, 0]], dtype=np.int32)
    assert np.flatnonzero(unpack(masks[0], 40)).tolist() == [0, 33]
    assert unpack(masks, 33).shape == (2, 33)
    assert unpack(masks, 33)[1].sum() == 32
