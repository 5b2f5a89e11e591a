"""Tokens are drawn from the right distribution, from the request's own seed, and greedy draws nothing."""

from __future__ import annotations

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
from dataplane.decoding.sampler import RowParams, sample
from dataplane.protocol import SamplingParams

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
    assert bad == []


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
    assert bad == [0]
    assert tokens[1] == int(spread().argmax())


def test_a_row_of_minus_infinities_is_named() -> None:
    tokens, bad = sample(torch.full((1, VOCAB), float("-inf")), [row(temperature=0.0)])
    assert (len(tokens), bad) == (1, [0])
