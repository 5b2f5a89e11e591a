"""Requests for a simulated run, and the figures of one.

Layer: service. Requests are drawn one by one, so that no more prompts are in memory than wait or run.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence

from dataplane.bench.traces import MOONCAKE_BLOCK, TraceRow
from dataplane.protocol import SamplingParams
from dataplane.request import Request

Lengths = tuple[int, int]
"""Tokens of a prompt and of its output."""

_PARAMS = SamplingParams(ignore_eos=True)


def request_of(request_id: str, prompt: list[int], output: int, arrival: float = 0.0, tenant: str = "") -> Request:
    """A request that generates `output` tokens, which no policy is told."""
    return Request(
        request_id=request_id,
        tokens=prompt,
        prompt_len=len(prompt),
        params=_PARAMS,
        max_tokens=output,
        seed=0,
        queued=arrival,
        tenant=tenant,
    )


def requests_of(lengths: Iterable[Lengths], arrivals: Iterable[float] | None = None) -> Iterator[Request]:
    """Requests that arrive at these moments (seconds, in order), or all at once. Their prompts say nothing."""
    for number, ((prompt, output), arrival) in enumerate(zip(lengths, arrivals or itertools.repeat(0.0), strict=False)):
        yield request_of(str(number), [0] * prompt, output, arrival)


def requests_of_trace(rows: Iterable[TraceRow], speed: float = 1.0) -> Iterator[Request]:
    """The rows as they arrived, `speed` times as fast. Prompts with equal blocks begin with equal tokens."""
    for number, row in enumerate(rows):
        yield request_of(str(number), prompt_of(row), row.output, row.arrival / speed, row.client)


def prompt_of(row: TraceRow) -> list[int]:
    """Tokens that are those of another row exactly as far as its blocks are."""
    if not row.blocks:
        return [0] * row.prompt
    tokens = [block for block in row.blocks for _ in range(MOONCAKE_BLOCK)]
    del tokens[row.prompt :]
    return tokens


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Moments of arrival (seconds), `rate` of them per second on average, without end."""
    randomness, now = random.Random(seed), 0.0  # noqa: S311 - a workload is no secret
    while True:
        yield now
        now += randomness.expovariate(rate)


def exponential(count: int, mean_tokens: float, seed: int, prompt: int) -> list[Lengths]:
    """Outputs of exponential length, at least one token."""
    randomness = random.Random(seed)  # noqa: S311 - a workload is no secret
    return [(prompt, max(1, round(randomness.expovariate(1 / mean_tokens)))) for _ in range(count)]


def lengths_of(rows: Iterable[TraceRow], context: int) -> list[Lengths]:
    """Of those rows that a context of so many tokens has room for."""
    return [(row.prompt, row.output) for row in rows if row.prompt + row.output <= context]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of all do not exceed (nearest rank); 0 of none."""
    ordered = sorted(values)
    # 0.07 · 100 is a little above 7 in floating point, and no rank of its own.
    rank = math.ceil(round(share * len(ordered), 9))
    return ordered[max(0, rank - 1)] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
