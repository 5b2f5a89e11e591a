"""Bad words are never completed, however they begin."""

from __future__ import annotations

import random

import torch
from transformers import NoBadWordsLogitsProcessor

from dataplane.decoding.bad_words import BadWords


def test_a_single_token_is_always_banned_and_a_sequence_only_at_its_end() -> None:
    words = BadWords([(5,), (1, 2, 3), (2, 4)], [])
    assert words.banned() == [5]
    words.take(1)
    assert words.banned() == [5]
    words.take(2)
    assert sorted(words.banned()) == [3, 4, 5]
    words.take(9)
    assert words.banned() == [5]


def test_a_word_that_began_in_the_prompt_is_not_completed() -> None:
    assert BadWords([(1, 2, 3)], [7, 1, 2]).banned() == [3]
    assert BadWords([(1, 2, 3)], [2]).banned() == []


def test_what_is_banned_is_what_transformers_bans() -> None:
    """Small vocabulary, so that words begin, overlap and repeat often; also after a restart in the middle."""
    rng = random.Random(4)
    banned = 0
    for _ in range(60):
        count = rng.randint(1, 6)
        words = sorted({tuple(rng.choices(range(4), k=rng.randint(1, 5))) for _ in range(count)})
        tokens = rng.choices(range(4), k=rng.randint(1, 4))
        ours = BadWords(words, tokens)
        theirs = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
        for _ in range(12):
            scores = theirs(torch.tensor([tokens]), torch.zeros(1, 5))[0]
            expected = set(torch.nonzero(scores == -torch.inf).flatten().tolist())
            assert set(ours.banned()) == set(BadWords(words, tokens).banned()) == expected
            banned += len(expected)
            tokens.append(rng.randrange(4))
            ours.take(tokens[-1])
    assert banned > 300
