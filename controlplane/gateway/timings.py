"""When a stream's tokens came: TTFT, TPOT and ITL of one request.

Layer: service. Pure: the caller gives the clock's readings. Times are seconds on one monotonic clock. TTFT is first
any token and first visible token, from acceptance. TPOT is (last − first)/(n − 1) with n from the engine's usage, so
that it does not depend on how tokens were chunked (F26). ITL is the gap between arrivals, weighted by the tokens that
arrived. This module must never guess a token count that usage contradicts.
"""

from __future__ import annotations

import math

from dataplane.protocol import Histogram


class StreamTimes:
    """Arrivals of one streamed request. `arrive` once a read and choice, `finish` when a choice says why it ended."""

    __slots__ = ("_finished", "_firsts", "_itl", "_lasts", "accepted", "counted", "first", "first_visible")

    def __init__(self, accepted: float) -> None:
        self.accepted = accepted
        self.first: float | None = None
        self.first_visible: float | None = None
        self.counted = 0
        """Tokens seen in chunks; the engine's usage may know of more."""
        self._firsts: dict[int, float] = {}
        self._lasts: dict[int, float] = {}
        self._finished: dict[int, float] = {}
        self._itl = Histogram()

    def arrive(self, now: float, choice: int, tokens: int, *, visible: bool) -> None:
        """`tokens` ≥ 1 tokens of `choice` were read at `now`."""
        if self.first is None:
            self.first = now
        if visible and self.first_visible is None:
            self.first_visible = now
        self.counted += tokens
        last = self._lasts.get(choice)
        if last is None:
            self._firsts[choice] = now
        else:
            self._itl.record((now - last) / tokens, tokens)
        self._lasts[choice] = now

    def finish(self, now: float, choice: int) -> None:
        """`choice` ended at `now`, with or without a token of its own (an end-of-sequence token has no text)."""
        self._finished[choice] = now

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.accepted

    @property
    def ttft_visible(self) -> float | None:
        return None if self.first_visible is None else self.first_visible - self.accepted

    def settle(self, tokens: int) -> None:
        """The engine produced `tokens` in all. One more per choice than was seen is the end-of-sequence token, which
        came with the finish."""
        for choice, now in self._finished.items():
            if self.counted < tokens and now > self._lasts.get(choice, -math.inf):
                self.arrive(now, choice, 1, visible=False)

    def tpot(self, tokens: int) -> float | None:
        """(last − first)/(n − 1) in seconds; of several choices, the token-weighted mean. None when no gap was seen."""
        gaps = tokens - len(self._firsts)
        span = sum(self._lasts[choice] - first for choice, first in self._firsts.items())
        return span / gaps if gaps > 0 and span > 0.0 else None

    def itl(self, tokens: int) -> Histogram | None:
        """Token-weighted gaps. When chunks held several tokens each, gaps and weights are scaled to `tokens`:
        a gap shared by r times as many tokens moves down log2(r) octaves, to within one bucket."""
        if not self._itl.count:
            return None
        if tokens == self.counted or not tokens:
            return self._itl
        ratio = tokens / self.counted
        shift = round(Histogram.PER_OCTAVE * math.log2(ratio))
        scaled = Histogram(total=self._itl.total)
        seen = given = 0
        for index, n in sorted(self._itl.buckets.items()):
            seen += n
            weight = round(seen * ratio) - given
            given += weight
            if weight:
                target = max(index - shift, Histogram.MIN_INDEX + 1)
                scaled.buckets[target] = scaled.buckets.get(target, 0) + weight
        scaled.zero = round(self._itl.zero * ratio)
        scaled.over = round(self._itl.over * ratio)
        scaled.count = given + scaled.zero + scaled.over
        return scaled
