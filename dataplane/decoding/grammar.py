"""Structured output: which tokens may come next so that the text stays in a language.

Layer: model algorithm. Torch-free. A `GrammarCompiler` turns a `Grammar` of the wire into a `CompiledGrammar`, of
which every sequence gets its own `GrammarState`; the sampler asks the state for a mask before it draws and tells it
the token after. It owns the bounds on what a client's grammar may cost; it never sees logits.

The work is llguidance's (docs/adr/0011): derivatives of regular expressions under an Earley parser, over the
vocabulary as a trie. The bounds here are counted, not timed, so that every engine takes or refuses the same grammars. A
replica's front refuses more of them, by the time and memory that they take there (`dataplane.grammar_check`).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from dataplane.decoding.schema_check import check_schema
from dataplane.protocol import Grammar, GrammarKind
from dataplane.request import RequestError

MAX_TEXT = 64 * 1024
"""Characters a schema, expression, grammar or list of choices may have."""
MAX_CHOICES = 1999
"""Strings one may be chosen from: alternatives that llguidance follows side by side."""
GBNF_RULE = re.compile(r"^\ufeff?[ \t]*[\w-]+\s*::=", re.MULTILINE)
KEPT = 32
"""Compiled grammars that are kept, the least recently used one leaving first."""
TRIAL_STEPS = 4
"""Tokens a new grammar is tried with."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"
"""Between two parts of a JSON text: room for indentation, an end to a model that only makes spaces."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Work for compiling, work for one token, and memory (1-2 kB a state) that one grammar may take."""

Mask = NDArray[np.int32]
"""One bit per token, the lowest bit of a word first; 1 means allowed."""


class GrammarError(Exception):
    """A sequence cannot go on in its grammar: one sentence for whoever asked for it."""


def mask_words(vocab: int) -> int:
    """Words of a mask over `vocab` tokens."""
    return -(-vocab // 32)


def unpack(masks: Mask, vocab: int) -> NDArray[np.bool_]:
    """Masks [..., words] as truth values [..., vocab]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab, bitorder="little")
    return bits.view(np.bool_)


class Vocabulary(Protocol):
    """What a compiler needs of `dataplane.tokenizer.Tokenizer`."""

    eos_token_ids: tuple[int, ...]

    def vocabulary(self) -> tuple[list[bytes], list[int]]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class GrammarState:
    """One sequence's place in its grammar. Belongs to one thread at a time."""

    __slots__ = ("_matcher", "_renew", "_tokens")

    def __init__(self, matcher: LLMatcher, renew: Callable[[], LLMatcher] | None) -> None:
        """`renew` gives a matcher at the start with tables of its own; None where `matcher` has them already."""
        self._matcher, self._renew = matcher, renew
        self._tokens: list[int] = []

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next into `mask`, a contiguous row of `mask_words(vocab)` words.

        At least one may: an end of sequence where the text may end, and nothing else where it must. Where the grammar
        leaves one text only, that is the model's own way to write it. Raises GrammarError when this place takes more
        work than one token may; the mask is then not to be used.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() and self._started_anew():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarError(f"the text cannot go on in its grammar: {_failure(self._matcher)}")

    def accept(self, token: int) -> None:
        """Move on by a token the mask allowed. After the end, only another end of sequence is allowed.

        Raises GrammarError when it was not allowed, or when moving on takes more work than one token may.
        """
        moved = self._matcher.consume_token(token)
        if not moved and self._started_anew():
            moved = self._matcher.consume_token(token)
        if not moved:
            raise GrammarError(f"the text cannot go on in its grammar: {_failure(self._matcher)}")
        self._tokens.append(token)

    @property
    def finished(self) -> bool:
        """Nothing but an end of sequence may follow: what holds ends back (`min_tokens`) has to yield."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """The text so far is in the language."""
        return self._matcher.is_accepting()

    def _started_anew(self) -> bool:
        """All sequences of a grammar fill its tables, and full ones fail everybody: go on with empty ones, once."""
        if self._renew is None:
            return False
        self._matcher, self._renew = self._renew(), None
        self._matcher.consume_tokens(self._tokens)
        return True


class CompiledGrammar:
    """A grammar over one vocabulary; starts sequences, all of which share its tables."""

    def __init__(self, build: Callable[[], LLMatcher], matcher: LLMatcher) -> None:
        """`matcher` comes from `build`, stands at the start and is never moved."""
        self._build, self._matcher = build, matcher

    def start(self, tokens: Iterable[int] = ()) -> GrammarState:
        """A sequence that has generated `tokens` so far (after a preemption); none of the prompt is among them.

        Raises GrammarError when they are not in the language.
        """
        state = GrammarState(self._matcher.deep_copy(), self._renewed)
        for token in tokens:
            state.accept(token)
        return state

    def _renewed(self) -> LLMatcher:
        """A matcher at the start with empty tables, which those who start from now on share."""
        self._matcher = self._build()
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may call it; one compiles at a time.

    `vocabulary` is asked for once, when the first grammar comes. `vocab` is the width of the model's logits, which may
    exceed the tokenizer's size.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        vocab: int,
        *,
        limits: LLParserLimits = LIMITS,
        kept: int = KEPT,
    ) -> None:
        self._vocabulary = vocabulary
        self.vocab = vocab
        self._limits = limits
        self._kept = kept
        self._tokens: LLTokenizer | None = None
        self._done: OrderedDict[tuple[GrammarKind, str], CompiledGrammar | RequestError] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar, from the last ones kept if it is among them.

        Raises RequestError (`invalid_grammar`) when it is malformed, empty, asks for what cannot be enforced, or is
        over the limits. It takes milliseconds, in rare cases a second: whoever cannot wait calls it elsewhere first.
        """
        key = (grammar.kind, grammar.text)
        with self._lock:
            found = self._done.pop(key, None)
            if found is None:
                found = self._compiled(grammar)
            self._done[key] = found
            if len(self._done) > self._kept:
                self._done.popitem(last=False)
        if isinstance(found, RequestError):
            raise found
        return found

    def _compiled(self, grammar: Grammar) -> CompiledGrammar | RequestError:
        if len(grammar.text) > MAX_TEXT:
            return _refusal(f"is longer than {MAX_TEXT} characters")
        try:
            source, tokens = _source(grammar), self._trie()
        except (ValueError, RecursionError) as error:
            return _refusal(f"cannot be used: {error}")

        def build() -> LLMatcher:
            return LLMatcher(tokens, source, log_level=0, limits=self._limits)

        matcher = build()
        if matcher.is_error():
            return _refusal(f"cannot be used: {_failure(matcher)}")
        try:
            self._try_out(GrammarState(matcher.deep_copy(), renew=None))
        except GrammarError as error:
            return _refusal(f"cannot be used: {error}")
        return CompiledGrammar(build, matcher)

    def _try_out(self, state: GrammarState) -> None:
        """A few steps, in which a grammar shows that it has no text at all or is too large to be walked."""
        mask = np.zeros(mask_words(self.vocab), dtype=np.int32)
        for _ in range(TRIAL_STEPS):
            state.fill(mask)
            state.accept(int(unpack(mask, self.vocab).argmax()))

    def _trie(self) -> LLTokenizer:
        """Raises ValueError when the model cannot have structured output."""
        if self._tokens is None:
            model = self._vocabulary()
            if not model.eos_token_ids:
                raise ValueError("this model has no end of sequence")
            spelling = _Spelling(model, self.vocab)
            self._tokens = LLTokenizer(
                TokenizerWrapper(spelling), n_vocab=self.vocab, eos_token=list(model.eos_token_ids)
            )
        return self._tokens


class _Spelling:
    """What llguidance asks of a tokenizer, padded to `vocab` tokens."""

    bos_token_id = None

    def __init__(self, model: Vocabulary, vocab: int) -> None:
        self._encode = model.encode
        tokens, special = model.vocabulary()
        self.tokens = [*tokens, *[b""] * (vocab - len(tokens))]
        self.special_token_ids = special
        self.eos_token_id = model.eos_token_ids[0]
        self._special = frozenset(special)
        self._bytes = {raw: token for token, raw in enumerate(tokens) if len(raw) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """How the model writes `text`; a text that reads like a special token is spelt out."""
        raw = text.encode() if isinstance(text, str) else text
        ids = self._encode(raw.decode("utf-8", "replace"), add_special_tokens=False)
        if self._special.isdisjoint(ids):
            return ids
        return [self._bytes[raw[at : at + 1]] for at in range(len(raw)) if raw[at : at + 1] in self._bytes]


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own words. Raises ValueError when it cannot be read."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_source('{"type": "object"}')
        case GrammarKind.JSON_SCHEMA:
            return _json_source(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_lark(grammar.text))
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choice(json.loads(grammar.text)))


def _json_source(schema: str) -> str:
    """`lenient` would let a schema have its unsupported keywords ignored."""
    root = json.loads(schema)
    if not isinstance(root, dict):
        raise ValueError("a schema must be an object")  # noqa: TRY004 - of JSON, not of Python
    check_schema(root)
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}
    )


def _lark(text: str) -> str:
    """GBNF (`root ::= …`) is turned into Lark (`start: …`), which is taken as it is."""
    if not GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter has no base class of its own
        raise ValueError(str(error)) from error


def _choice(choices: object) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choice must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"choice holds {len(choices)} strings, at most {MAX_CHOICES} may be given; enum takes more")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _failure(matcher: LLMatcher) -> str:
    """What llguidance says of it, in one line."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").strip().splitlines() or [""]
    if not lines[0] or lines[0].startswith("NoExtension"):
        return "no text at all is in it"
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    return f"{lines[0][:300]} {reason[:100]}".strip()


def _refusal(sentence: str) -> RequestError:
    return RequestError(f"the grammar {sentence}", "invalid_grammar", "structured_outputs")
