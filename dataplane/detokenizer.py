"""Tokens to text as they come, and the search for stop strings.

Layer: service. Torch-free. Whatever the chunks, the pieces it gives out join to the text of all tokens at once;
a character is never split, and text that may turn out to begin a stop string is held back until it is known.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from dataplane.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """One request's text. After `stopped` is set nothing more comes."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0, skip_special: bool = True
    ) -> None:
        """A stop string that is complete before the `min_tokens`-th token is text like any other."""
        self._tokenizer = tokenizer
        self._unstopped = max(0, min_tokens - 1)
        self._skip_special = skip_special
        self._stop = StopScanner(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.trims_first_space
        self.position = 0
        """Characters that the tokens so far make certain, before any stop string is looked for."""

    @property
    def stopped(self) -> str | None:
        """The stop string that was found; the text before it is all there is."""
        return self._stop.found

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that `token_ids` make certain."""
        if not self._unstopped:
            return self._stop.push(self._text(token_ids))
        ids = list(token_ids)
        early, later = ids[: self._unstopped], ids[self._unstopped :]
        self._unstopped -= len(early)
        text = self._stop.push(self._text(early), search=False)
        return text + self._stop.push(self._text(later)) if later else text

    def _text(self, token_ids: Iterable[int]) -> str:
        raw = b"".join(self._tokenizer.token_bytes(token, skip_special=self._skip_special) for token in token_ids)
        if raw and self._at_start:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        text = self._decoder.decode(raw)
        self.position += len(text)
        return text

    def flush(self) -> str:
        """What was held back, at the end of the request; bytes that complete no character become U+FFFD."""
        return self._stop.push(self._decoder.decode(b"", final=True)) + self._stop.flush()


class StopScanner:
    """Passes text through up to the first stop string, which is left out.

    The stop that is complete first wins, the longer one if two end together: what a reader of single characters
    would find. Only a possible beginning of a stop string is kept, never more than the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, search: bool = True) -> str:
        """What of `text` is certain. Without `search`, a stop string that ends in it is none; one may begin in it."""
        if self.found is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        hit = self._first(text) if search else None
        if hit is not None:
            start, self.found = hit
            self._held = ""
            return text[:start]
        keep = max(self._overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and value of the stop string that ends first in `text`."""
        hits = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
