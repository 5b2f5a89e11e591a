"""Tokens are drawn from the right distribution, from the request's own seed, and greedy draws nothing."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dataplane.decoding import sampler
from dataplane.decoding.grammar import CompiledGrammar, GrammarCompiler, GrammarError, GrammarState
from dataplane.decoding.sampler import NOT_FINITE, NOTHING_LEFT, RowParams, sample
from dataplane.protocol import Grammar, GrammarKind, SamplingParams

VOCAB = 40


def row(seed: int = 1, tokens: tuple[int, ...] = (), prompt_len: int | None = None, **params: Any) -> RowParams:
    known = list(tokens)
    return RowParams(
        SamplingParams(**{"temperature": 1.0, **params}),
        seed,
        (2, 3),
        known,
        len(known) if prompt_len is None else prompt_len,
    )


def spread() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def distance(counts: Counter[int], draws: int, target: torch.Tensor) -> float:
    """Total variation between what was drawn and `target`."""
    drawn = torch.tensor([counts[token] / draws for token in range(VOCAB)])
    return float((drawn - target).abs().sum() / 2)


def draw(logits: torch.Tensor, draws: int, **params: Any) -> Counter[int]:
    rows = [row(seed, **params) for seed in range(draws)]
    return Counter(sample(logits.repeat(draws, 1), rows)[0])


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
            [TemperatureLogitsWarper(1.5), TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
        ),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 1000}, []),
    ],
)
def test_the_distribution_is_that_of_transformers(params: dict[str, Any], warpers: list[Any]) -> None:
    logits = spread()
    scores = LogitsProcessorList(warpers)(torch.tensor([[0]]), logits[None].clone())
    target = torch.softmax(scores[0], dim=-1)
    counts = draw(logits, 20_000, **params)
    assert set(counts) <= set(torch.nonzero(target).flatten().tolist())
    assert distance(counts, 20_000, target) < 0.02
    # Negative control: the same draws are far from another distribution.
    assert distance(counts, 20_000, torch.full((VOCAB,), 1 / VOCAB)) > 0.2


def test_more_draws_come_closer_to_the_target() -> None:
    logits = spread()
    target = torch.softmax(logits, dim=-1)
    few = distance(draw(logits, 200), 200, target)
    many = distance(draw(logits, 40_000), 40_000, target)
    assert many < few / 4


def test_greedy_takes_the_best_and_never_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a greedy batch paid for sampling")

    monkeypatch.setattr(sampler, "_draw", refuse)
    monkeypatch.setattr(sampler, "_adjust", refuse)
    logits = torch.stack([spread(), spread().flip(0)])
    tokens, bad = sample(logits, [row(temperature=0.0), row(temperature=0.0, top_p=0.1, top_k=3)])
    assert tokens == [int(logits[0].argmax()), int(logits[1].argmax())]
    assert bad == {}


def test_a_row_draws_the_same_whoever_stands_beside_it() -> None:
    logits = spread()
    alone = sample(logits[None].clone(), [row(7, top_p=0.9)])[0][0]
    others = [row(seed, temperature=0.0 if seed % 2 else 1.3, top_k=seed % 5) for seed in range(20)]
    batch = torch.randn(21, VOCAB)
    batch[13] = logits
    rows = [*others[:13], row(7, top_p=0.9), *others[13:]]
    assert sample(batch, rows)[0][13] == alone


def test_draws_differ_by_seed_and_position_and_repeat_with_both() -> None:
    uniforms = {
        row(seed, tokens=(1,) * generated, prompt_len=0).uniform for seed in range(50) for generated in range(50)
    }
    assert len(uniforms) == 2500
    assert all(0.0 <= value < 1.0 for value in uniforms)
    assert abs(sum(uniforms) / 2500 - 0.5) < 0.03
    moved = row(3, tokens=(1, 1), prompt_len=0)
    moved.take(5)
    assert moved.uniform == row(3, tokens=(1, 1, 1), prompt_len=0).uniform


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits, seen = spread(), (4, 9, 9, 17)
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([seen]), logits[None].clone())[0]
    adjusted = logits.clone()
    sampler._adjust(adjusted, row(tokens=seen, prompt_len=2, repetition_penalty=1.8))
    torch.testing.assert_close(adjusted, expected)


def test_presence_and_frequency_count_output_tokens_only() -> None:
    adjusted = torch.zeros(VOCAB)
    penalised = row(tokens=(8, 8, 4, 9, 9), prompt_len=2, presence_penalty=0.5, frequency_penalty=0.25)
    penalised.take(9)
    sampler._adjust(adjusted, penalised)
    assert adjusted[8] == 0.0
    assert adjusted[4] == pytest.approx(-0.75)
    assert adjusted[9] == pytest.approx(-1.25)


def test_stop_ids_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 100.0
    held = row(temperature=0.0, min_tokens=1)
    assert sample(logits.clone(), [held])[0][0] not in (2, 3)
    held.take(7)
    assert sample(logits.clone(), [held])[0] == [2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_named_and_harms_no_other(value: float) -> None:
    logits = torch.stack([spread(), spread()])
    logits[0, 11] = value
    tokens, bad = sample(logits, [row(temperature=1.0), row(temperature=0.0)])
    assert bad == {0: NOT_FINITE}
    assert tokens[1] == int(spread().argmax())


@pytest.mark.parametrize("params", [{}, {"logit_bias": {3: 5.0}}, {"frequency_penalty": 1.0}, {"min_tokens": 0}])
def test_a_row_of_minus_infinities_is_the_models_failure_where_the_request_forbids_nothing(
    params: dict[str, Any],
) -> None:
    tokens, bad = sample(torch.full((1, VOCAB), float("-inf")), [row(temperature=0.0, tokens=(5, 6), **params)])
    assert (len(tokens), bad) == (1, {0: NOT_FINITE})


def test_a_bias_is_added_and_nothing_else_changes() -> None:
    logits = spread()
    adjusted = logits.clone()
    biased = row(logit_bias={3: 7.5, 9: -2.0, 20: 0.0})
    assert not biased.plain
    sampler._adjust(adjusted, biased)
    changed = adjusted - logits
    assert changed[3] == pytest.approx(7.5)
    assert changed[9] == pytest.approx(-2.0)
    assert torch.equal(torch.nonzero(changed).flatten(), torch.tensor([3, 9]))


def test_a_bias_of_100_decides_and_of_minus_100_forbids() -> None:
    logits = spread()
    best = int(logits.argmax())
    assert sample(logits[None].clone(), [row(temperature=0.0, logit_bias={7: 100.0})])[0] == [7]
    assert best not in draw(logits, 2000, logit_bias={best: -100.0})
    assert best in draw(logits, 2000)


def test_bias_shifts_the_odds_by_its_exponential() -> None:
    draws = 40_000
    counts = draw(torch.zeros(VOCAB), draws, logit_bias={5: 2.0})
    target = torch.softmax(torch.eye(VOCAB)[5] * 2.0, dim=-1)
    assert distance(counts, draws, target) < 0.03
    assert distance(counts, draws, torch.full((VOCAB,), 1 / VOCAB)) > 0.1


def test_bad_words_are_followed_token_by_token() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6] = 9.0, 8.0
    watched = row(tokens=(1,), temperature=0.0, bad_words=((4, 4), (6,)))
    assert sample(logits.clone(), [watched])[0] == [4]
    watched.take(4)
    third = sample(logits.clone(), [watched])[0][0]
    assert third not in (4, 6)
    watched.take(third)
    assert sample(logits.clone(), [watched])[0] == [4]


def test_a_row_that_may_have_no_token_is_named_and_harms_no_other() -> None:
    logits = torch.stack([spread(), spread()])
    rows = [row(bad_words=tuple((token,) for token in range(VOCAB))), row(temperature=0.0)]
    tokens, bad = sample(logits, rows)
    assert bad == {0: NOTHING_LEFT}
    assert tokens[1] == int(spread().argmax())


LETTERS = [bytes([97 + token]) for token in range(26)]
EOS = 39


class Letters:
    """A vocabulary of single letters, ids 0 to 25, and special tokens."""

    eos_token_ids = (EOS,)

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        return [*LETTERS, *(b"" for _ in range(26, VOCAB))], list(range(26, VOCAB))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [LETTERS.index(letter.encode()) for letter in text if letter.encode() in LETTERS]


def spelling(expression: str) -> CompiledGrammar:
    compiler = GrammarCompiler(Letters, VOCAB)
    return compiler.compile(Grammar(kind=GrammarKind.REGEX, text=expression))


def spell(grammar: GrammarState, count: int, **params: Any) -> str:
    """Sample `count` tokens from random logits under a grammar."""
    text = ""
    params = SamplingParams(**params)
    drawn = RowParams(params, 5, (EOS,), [1], 1, grammar=grammar)
    for step in range(count):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step)) * 3
        (token,), bad = sample(logits, [drawn])
        assert not bad
        drawn.take(token)
        text += "." if token == EOS else LETTERS[token].decode()
    return text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_at_every_token_and_ends_the_text(temperature: float) -> None:
    text = spell(spelling("(ab|cd)x[p-t]{3}").start(), 8, temperature=temperature)
    assert re.fullmatch(r"(ab|cd)x[p-t]{3}\.\.", text)
    assert "." not in spell(spelling("[a-z]{8}").start(), 8, temperature=temperature)


def test_a_finished_grammar_ends_before_min_tokens() -> None:
    assert spell(spelling("ab").start(), 3, min_tokens=10) == "ab."
    held = spell(spelling("a+").start(), 9, min_tokens=9)
    assert held == "a" * 9


def test_what_a_grammar_needs_and_a_ban_forbids_is_named() -> None:
    torn = RowParams(SamplingParams(bad_words=((1,),)), 5, (), [0], 1, grammar=spelling("b").start())
    assert sample(spread()[None], [torn])[1] == {0: NOTHING_LEFT}


def test_logits_that_are_no_numbers_are_the_models_failure_whatever_the_grammar_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = spelling("b").start()

    def gives_up(*_: object) -> None:
        raise GrammarError("too much work")

    monkeypatch.setattr(GrammarState, "fill", gives_up)
    spelled = RowParams(SamplingParams(), 5, (), [0], 1, grammar=state)
    assert sample(torch.full((1, VOCAB), float("nan")), [spelled])[1] == {0: NOT_FINITE}
    assert sample(spread()[None], [spelled])[1] == {0: "too much work"}


def test_a_grammar_goes_on_where_a_preempted_request_stood() -> None:
    compiled = spelling("abcdef")
    assert spell(compiled.start([0, 1, 2]), 4) == "def."
