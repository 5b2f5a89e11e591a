"""Log-probabilities are log softmax of the logits, with rank and the likeliest in order."""

from __future__ import annotations

import math

import pytest
import torch

from dataplane.decoding.logprobs import score


def test_they_are_log_softmax_ranked_and_in_order() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(3)) * 4
    expected = torch.log_softmax(logits.double(), dim=-1)
    tokens = torch.tensor([int(logits[0].argmax()), int(logits[1].argmin()), 4, 4, 9, 0, 49])
    tops = [0, 3, 1, 5, 50, 2, 0]
    for row, (scored, token, top) in enumerate(zip(score(logits, tokens, tops), tokens.tolist(), tops, strict=True)):
        order = expected[row].argsort(descending=True).tolist()
        assert scored.token_id == token
        assert scored.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert scored.rank == order.index(token) + 1
        assert [likely for likely, _ in scored.top] == order[:top]
        assert [value for _, value in scored.top] == pytest.approx(expected[row, order[:top]].tolist(), abs=1e-5)


def test_equal_logits_share_the_better_rank() -> None:
    (scored,) = score(torch.tensor([[1.0, 5.0, 5.0, 0.0]]), torch.tensor([2]), [0])
    assert scored.rank == 1
    (scored,) = score(torch.zeros(1, 8), torch.tensor([3]), [8])
    assert (scored.rank, len(scored.top)) == (1, 8)
    assert scored.logprob == pytest.approx(-math.log(8))


def test_large_logits_neither_overflow_nor_lose_the_small_ones() -> None:
    (scored,) = score(torch.tensor([[1000.0, 990.0, -1000.0]]), torch.tensor([1]), [1])
    assert scored.logprob == pytest.approx(-10.0, abs=1e-3)
    assert scored.top == [(0, pytest.approx(0.0, abs=1e-3))]
