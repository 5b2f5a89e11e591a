"""Bad words: token sequences that a request must not complete.

Layer: model algorithm. Pure. As in transformers, a sequence that began in the prompt is not completed either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BadWords:
    """Watches one request's last tokens, only as many as its longest word needs."""

    __slots__ = ("_single", "_tail", "_words")

    def __init__(self, words: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> None:
        """`tokens` are those before the next one, prompt and output."""
        self._single = [word[0] for word in words if len(word) == 1]
        self._words = [word for word in words if len(word) > 1]
        reach = max((len(word) - 1 for word in self._words), default=0)
        self._tail = deque(tokens[-reach:] if reach else (), maxlen=reach)

    def take(self, token: int) -> None:
        """`token` came next."""
        self._tail.append(token)

    def banned(self) -> list[int]:
        """Tokens that would complete a word now."""
        tail = tuple(self._tail)
        return self._single + [word[-1] for word in self._words if tail[-(len(word) - 1) :] == word[:-1]]
