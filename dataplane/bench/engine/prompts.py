"""Prompts that every side reads as the same token ids, each used once.

Layer: service. Random whole words: a text of them is cut into exactly the tokens it was made of, so that a server
that takes texts only computes what one that takes ids does. That is checked for each prompt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.bench.errors import BenchError
from dataplane.tokenizer import Tokenizer

WORD = re.compile(rb" [a-z]{2,}")
ENOUGH_WORDS = 256
"""With fewer whole words a vocabulary gives no text, and prompts are ids alone."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is None where the vocabulary has no words that survive being cut again."""

    ids: tuple[int, ...]
    text: str | None


class Prompts:
    """Draws prompts from `seed`: the same sequence for the same seed and model."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)  # noqa: S311 - prompts are no secret
        self._begin = tokenizer.encode("")
        self._words = self._whole_words()
        self.as_text = len(self._words) >= ENOUGH_WORDS

    def draw(self, length: int, prefix: Prompt | None = None) -> Prompt:
        """A prompt of `length` tokens, the first of them those of `prefix`. Raises BenchError when its text would be
        cut otherwise."""
        if not self.as_text:
            known = prefix.ids if prefix else ()
            fresh = (self._random.randrange(self._tokenizer.vocab_size) for _ in range(length - len(known)))
            return Prompt((*known, *fresh), None)
        begun = list(prefix.ids) if prefix else self._begin
        ids = [*begun, *self._random.choices(self._words, k=length - len(begun))]
        text = self._tokenizer.decode(ids)
        if self._tokenizer.encode(text) != ids:
            raise BenchError(f"a prompt of {length} tokens is not cut into the tokens it was made of")
        return Prompt(tuple(ids), text)

    def between(self, low: int, high: int) -> int:
        """A length from `low` to `high`, both possible."""
        return self._random.randint(low, high)

    def gaps(self, rate: float, count: int) -> Sequence[float]:
        """Seconds between `count` Poisson arrivals at `rate` a second."""
        return [self._random.expovariate(rate) for _ in range(count)]

    def _whole_words(self) -> list[int]:
        """Tokens that are a lower-case word after a space, and are cut as themselves."""
        found = []
        for token in range(self._tokenizer.vocab_size):
            raw = self._tokenizer.token_bytes(token)
            if WORD.fullmatch(raw) and self._tokenizer.encode(raw.decode(), add_special_tokens=False) == [token]:
                found.append(token)
        return found
