"""`tidegate bench grammar`: what structured output costs, by library.

Layer: service. Every grammar is compiled and walked along a text that is in it, in a process of its own: processor
time to compile, per token for the mask, memory, and what is refused, wrong or too slow. llguidance is measured
through the engine's own compiler; xgrammar beside it where it is installed (docs/adr/0011).

JSON keys: `setup` by library: `seconds` and `memory_bytes` until the first grammar can be compiled. `grammars`:
`library`, `case`, `outcome` ("ok", "refused", "rejects its own text", "accepts what it should not", "over its limits",
"killed"), `compile_ms`, `mask_us` and `mask_us_max` (processor time), `memory_bytes`, `said`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dataplane.bench.report import Report, Table
from dataplane.decoding.grammar import GrammarCompiler, GrammarError, Mask, mask_words
from dataplane.hardware.device import resident_memory
from dataplane.protocol import Grammar, GrammarKind
from dataplane.request import RequestError
from dataplane.tokenizer import Tokenizer, load_tokenizer

PATIENCE_S = 20.0
"""After this a grammar counts as killed."""


class Walker(Protocol):
    """A place in a grammar."""

    def fill(self, mask: Mask) -> None: ...

    def accept(self, token: int) -> bool: ...

    @property
    def complete(self) -> bool: ...


Start = Callable[[Grammar], Walker]
"""Compiles a grammar and stands at its start. Raises ValueError or RuntimeError when it refuses."""


@dataclass(frozen=True, slots=True)
class Case:
    """A grammar, a text that is in it and one that is not; no text where it has none or should be refused."""

    name: str
    kind: GrammarKind
    text: str
    inside: str | None = None
    outside: str | None = None


def cases() -> Iterator[Case]:
    """Plain ones, large ones, ones that explode and ones that cannot be."""
    schema, regex, ebnf, choice = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.CHOICE
    yield Case("any JSON object", GrammarKind.JSON_OBJECT, "", '{"name": "Ada", "list": [1, 2.5e3, null]}')
    fields = {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}
    yield Case("small schema", schema, _object(fields), '{"name": "Ada Lovelace of London", "age": 36}', "[1]")
    texts = {f"p{i}": {"type": ["string", "null"], "maxLength": 200} for i in range(8)}
    large = _object({f"field_{i}": json.loads(_object(texts)) for i in range(40)}, required=["field_0"])
    whole = json.dumps({"field_0": dict.fromkeys(texts, "hello")})
    yield Case("schema of 320 fields", schema, large, whole)
    either = [json.loads(_object({"kind": {"const": f"k{i}"}, "x": {"type": "string"}})) for i in range(200)]
    yield Case("anyOf of 200 objects", schema, json.dumps({"anyOf": either}), '{"kind": "k77", "x": "abc"}')
    named = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
    yield Case("patternProperties", schema, json.dumps(named), '{"x1": 4}', '{"y": 4}')
    yield Case("date by regex", regex, "[0-9]{4}-[0-9]{2}-[0-9]{2}", "2024-03-01", "2024-3-1")
    yield Case("regex of 1 to 2,000 letters", regex, "[a-z ]{1,2000}", "hello world this is a text", "7")
    yield Case("arithmetic by EBNF", ebnf, 'root ::= t ("+" t)*\nt ::= [0-9]+ | "(" root ")"\n', "1+(2+3)+44", "1+")
    yield Case("500 choices", choice, json.dumps([f"item number {i}" for i in range(500)]), "item number 77", "x")
    yield Case("explodes: (a|b)*a(a|b){40}", regex, "(a|b)*a(a|b){40}", "a" + "ab" * 20, "b" * 41)
    yield Case("explodes: (a{0,1000}){1000}", regex, "(a{0,1000}){1000}", "aaaaaaaaa", "7")
    yield Case("explodes: (a?){3000}a{3000}", regex, "(a?){3000}a{3000}")
    yield Case("explodes: multipleOf 99991", schema, '{"type": "integer", "multipleOf": 99991}', "99991", "99990")
    yield Case("explodes: 300 nested", schema, '{"properties": {"a": ' * 300 + "true" + "}}" * 300, "{}")
    yield Case("impossible: 5 ≤ x ≤ 3", schema, '{"type": "integer", "minimum": 5, "maximum": 3}')
    yield Case("not", schema, '{"not": {"type": "string"}}', None, '"text"')
    yield Case("uniqueItems", schema, '{"type": "array", "uniqueItems": true, "items": {"enum": [1]}}', None, "[1, 1]")
    yield Case("endless: root = a root", ebnf, 'root ::= "a" root')


def _object(properties: dict[str, Any], required: list[str] | None = None) -> str:
    return json.dumps(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties) if required is None else required,
            "additionalProperties": False,
        }
    )


# Libraries ---------------------------------------------------------------------------------------------------------


class _Ours:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)
        self._compiler.compile(Grammar(kind=GrammarKind.CHOICE, text='["warm"]'))

    def __call__(self, grammar: Grammar) -> Walker:
        try:
            state = self._compiler.compile(grammar).start()
        except RequestError as error:
            raise ValueError(error.message) from None
        return _OurWalker(state.fill, state.accept, lambda: state.complete)


@dataclass(frozen=True, slots=True)
class _OurWalker:
    fill: Callable[[Mask], None]
    step: Callable[[int], None]
    whole: Callable[[], bool]

    def accept(self, token: int) -> bool:
        try:
            self.step(token)
        except GrammarError:
            return False
        return True

    @property
    def complete(self) -> bool:
        return self.whole()


class _XGrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        tokens, special = tokenizer.vocabulary()
        for token in special:
            tokens[token] = b""
        info = self._library.TokenizerInfo(
            tokens, vocab_size=tokenizer.vocab_size, stop_token_ids=list(tokenizer.eos_token_ids)
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def __call__(self, grammar: Grammar) -> Walker:
        compiler, text = self._compiler, grammar.text
        match grammar.kind:
            case GrammarKind.JSON_OBJECT:
                compiled = compiler.compile_json_schema('{"type": "object"}')
            case GrammarKind.JSON_SCHEMA:
                compiled = compiler.compile_json_schema(text)
            case GrammarKind.REGEX:
                compiled = compiler.compile_regex(text)
            case GrammarKind.EBNF:
                compiled = compiler.compile_grammar(text)
            case GrammarKind.CHOICE:
                compiled = compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, json.loads(text))))
        return _XWalker(self._library.GrammarMatcher(compiled))


class _XWalker:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: Mask) -> None:
        self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_completed())


LIBRARIES: dict[str, Callable[[Tokenizer], Start]] = {"llguidance": _Ours, "xgrammar": _XGrammar}


# Measuring ---------------------------------------------------------------------------------------------------------


def measure(start: Start, tokenizer: Tokenizer, case: Case) -> dict[str, Any]:
    """Compile and walk one grammar, in this process."""
    before, began = resident_memory(), time.process_time()
    row: dict[str, Any] = {"case": case.name, "outcome": "ok", "said": ""}
    grammar = Grammar(kind=case.kind, text=case.text)
    try:
        start(grammar)
        row["compile_ms"] = 1e3 * (time.process_time() - began)
        if case.inside is not None and not _walk(start(grammar), tokenizer, case.inside, row):
            row["outcome"] = "rejects its own text"
        elif case.outside is not None and _walk(start(grammar), tokenizer, case.outside, {}):
            row["outcome"] = "accepts what it should not"
    except GrammarError as error:
        row |= {"outcome": "over its limits", "said": str(error)[:200]}
    except (ValueError, RuntimeError) as error:
        row |= {"outcome": "refused", "compile_ms": 1e3 * (time.process_time() - began), "said": str(error)[:200]}
    return {**row, "memory_bytes": resident_memory() - before}


def _walk(walker: Walker, tokenizer: Tokenizer, text: str, row: dict[str, Any]) -> bool:
    mask, times = np.zeros(mask_words(tokenizer.vocab_size), dtype=np.int32), []
    for token in tokenizer.encode(text, add_special_tokens=False):
        began = time.process_time()
        walker.fill(mask)
        times.append(1e6 * (time.process_time() - began))
        if not mask[token // 32] >> (token % 32) & 1 or not walker.accept(token):
            return False
    row |= {"mask_us": statistics.median(times), "mask_us_max": max(times)}
    return walker.complete


def _child(sink: Connection, library: str, model: Path, names: list[str]) -> None:
    """Measures one library's cases, each in a fork of this process, and sends the rows."""
    tokenizer = load_tokenizer(model)
    before, began = resident_memory(), time.process_time()
    start = LIBRARIES[library](tokenizer)
    sink.send({"seconds": time.process_time() - began, "memory_bytes": resident_memory() - before})
    fork = multiprocessing.get_context("fork")
    for case in (case for case in cases() if case.name in names):
        own, other = fork.Pipe()
        process = fork.Process(target=lambda: other.send(measure(start, tokenizer, case)))  # noqa: B023 - run at once
        process.start()
        row = own.recv() if own.poll(PATIENCE_S) else {"case": case.name, "outcome": "killed", "said": ""}
        process.kill()
        process.join()
        sink.send({"library": library, **row})
    sink.send(None)


def run(model: Path, *, only: str = "") -> Report:
    """Every case whose name contains `only`, for every library that is installed."""
    names = [case.name for case in cases() if only in case.name]
    setup: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for library in LIBRARIES:
        try:
            versioned = f"{library} {version(library)}"
        except PackageNotFoundError:
            continue
        spawn = multiprocessing.get_context("spawn")
        own, other = spawn.Pipe()
        process = spawn.Process(target=_child, args=(other, library, model, names))
        process.start()
        setup[versioned] = own.recv()
        while (row := own.recv()) is not None:
            rows.append(row)
        process.join()
    return _report(model, setup, rows)


def _report(model: Path, setup: dict[str, Any], rows: list[dict[str, Any]]) -> Report:
    report = Report("grammar", {"model": model.name}, seed=0)
    report.results = {"setup": setup, "grammars": rows}
    first = [(name, f"{one['seconds']:.2f} s", f"{one['memory_bytes'] / 2**20:.0f} MiB") for name, one in setup.items()]
    report.tables.append(Table("Before the first grammar", ("library", "processor time", "memory"), tuple(first)))
    body = [
        (
            row["case"],
            row["library"],
            row["outcome"],
            _number(row, "compile_ms"),
            _number(row, "mask_us"),
            _number(row, "mask_us_max"),
            f"{row.get('memory_bytes', 0) / 2**20:.0f}",
        )
        for row in sorted(rows, key=lambda row: [case.name for case in cases()].index(row["case"]))
    ]
    columns = ("grammar", "library", "outcome", "compile ms", "mask µs, median", "most", "memory MiB")
    report.tables.append(Table("Grammars", columns, tuple(body), "Processor time; the first mask fills caches."))
    return report


def _number(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.1f}" if name in row else "-"
