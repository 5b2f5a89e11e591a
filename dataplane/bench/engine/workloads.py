"""The loads: what is asked of a side, and the figures its answers come to.

Layer: service. A load draws its requests once for each pair, so that both sides get the same; it knows no side. W1 to
W5 differ in which part of the engine they wait for: decode, prefill, the batch, the prefix cache, the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median
from typing import Any, Protocol

from dataplane.bench.engine.client import Answer, Ask, Caller
from dataplane.bench.engine.paired import quantile
from dataplane.bench.engine.prompts import Prompts
from dataplane.bench.errors import SideError

Plan = Sequence[Sequence[Ask]]
"""Groups of requests, one group after another is answered."""
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """What a number is: its unit, and whether more of it is better."""

    unit: str
    more_is_better: bool


class Workload(Protocol):
    """`figures` by name; the first stands for the load."""

    @property
    def name(self) -> str: ...

    @property
    def figures(self) -> Mapping[str, Figure]: ...

    @property
    def lengths(self) -> dict[str, Any]:
        """Tokens, for the case."""

    def plan(self, prompts: Prompts) -> Plan:
        """Fresh requests for one pair."""

    async def run(self, caller: Caller, plan: Plan) -> Figures:
        """Ask and measure. Raises SideError."""


@dataclass(frozen=True, slots=True)
class SingleStream:
    """W1: one request alone; its decode speed is 1 / TPOT."""

    prompt: int
    output: int
    name: str = "w1"
    figures: Mapping[str, Figure] = field(
        default_factory=lambda: {"decode_tokens_per_s": Figure("tok/s", True), "ttft_s": Figure("s", False)}
    )

    @property
    def lengths(self) -> dict[str, Any]:
        return {"requests": 1, "prompt": self.prompt, "output": self.output}

    def plan(self, prompts: Prompts) -> Plan:
        return [[Ask(prompts.draw(self.prompt), self.output)]]

    async def run(self, caller: Caller, plan: Plan) -> Figures:
        (answer,) = await caller.all(plan[0])
        if answer.tpot <= 0:
            raise SideError(f"{caller.endpoint.name} showed all of its tokens at once: it does not stream")
        return {"decode_tokens_per_s": 1 / answer.tpot, "ttft_s": answer.ttft}


@dataclass(frozen=True, slots=True)
class Prefill:
    """W2: one prompt and one token of answer; its TTFT is the prefill."""

    prompt: int
    name: str = "w2"
    figures: Mapping[str, Figure] = field(
        default_factory=lambda: {"prefill_tokens_per_s": Figure("tok/s", True), "ttft_s": Figure("s", False)}
    )

    @property
    def lengths(self) -> dict[str, Any]:
        return {"requests": 1, "prompt": self.prompt, "output": 1}

    def plan(self, prompts: Prompts) -> Plan:
        return [[Ask(prompts.draw(self.prompt), 1)]]

    async def run(self, caller: Caller, plan: Plan) -> Figures:
        (answer,) = await caller.all(plan[0])
        return {"prefill_tokens_per_s": self.prompt / answer.ttft, "ttft_s": answer.ttft}


@dataclass(frozen=True, slots=True)
class Batch:
    """W3: a batch given at once. `prompt` and `output` are the least and the most tokens, drawn for each request."""

    name: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    figures: Mapping[str, Figure] = field(
        default_factory=lambda: {"output_tokens_per_s": Figure("tok/s", True), "total_s": Figure("s", False)}
    )

    @property
    def lengths(self) -> dict[str, Any]:
        return {"requests": self.requests, "prompt": list(self.prompt), "output": list(self.output)}

    def plan(self, prompts: Prompts) -> Plan:
        sizes = [(prompts.between(*self.prompt), prompts.between(*self.output)) for _ in range(self.requests)]
        return [[Ask(prompts.draw(prompt), output) for prompt, output in sizes]]

    async def run(self, caller: Caller, plan: Plan) -> Figures:
        answers = await caller.all(plan[0])
        seconds = elapsed(answers)
        return {"output_tokens_per_s": sum(answer.tokens for answer in answers) / seconds, "total_s": seconds}


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """W4: many requests with one prefix, then one prompt cold and another that shares its longer prefix, warm.

    Both prefixes are new in every pair, so that what is warm was warmed within it.
    """

    requests: int
    prefix: int
    tail: int
    output: int
    long_prefix: int
    long_tail: int
    name: str = "w4"
    figures: Mapping[str, Figure] = field(
        default_factory=lambda: {
            "total_s": Figure("s", False),
            "ttft_cold_s": Figure("s", False),
            "ttft_warm_s": Figure("s", False),
            "warm_over_cold": Figure("", False),
        }
    )

    @property
    def lengths(self) -> dict[str, Any]:
        batch = {"requests": self.requests, "prefix": self.prefix, "tail": self.tail, "output": self.output}
        return {"batch": batch, "ttft": {"prefix": self.long_prefix, "tail": self.long_tail, "output": 1}}

    def plan(self, prompts: Prompts) -> Plan:
        shared, longer = prompts.draw(self.prefix), prompts.draw(self.long_prefix)
        whole = [prompts.draw(self.prefix + self.tail, shared) for _ in range(self.requests)]
        cold, warm = (prompts.draw(self.long_prefix + self.long_tail, longer) for _ in range(2))
        return [
            [Ask(prompt, self.output, may_be_cached=True) for prompt in whole],
            [Ask(cold, 1)],
            [Ask(warm, 1, may_be_cached=True)],
        ]

    async def run(self, caller: Caller, plan: Plan) -> Figures:
        batch, cold, warm = plan
        answers = await caller.all(batch)
        (first,), (second,) = await caller.all(cold), await caller.all(warm)
        return {
            "total_s": elapsed(answers),
            "ttft_cold_s": first.ttft,
            "ttft_warm_s": second.ttft,
            "warm_over_cold": second.ttft / first.ttft,
        }


@dataclass(frozen=True, slots=True)
class Arrivals:
    """W5: Poisson arrivals at a low rate, and at half of what the batch of equal lengths showed to be possible: the
    slower side's half, for both, so that neither queue grows without end. Rates are requests a second.

    `half_rate` is found out before the first pair (`at`). The tail of fewer than a hundred requests is the worst.
    """

    requests: int
    prompt: int
    output: int
    half_rate: float = 1.0
    low_rate: float = 1.0
    name: str = "w5"
    figures: Mapping[str, Figure] = field(
        default_factory=lambda: {
            "half_ttft_p99_s": Figure("s", False),
            "half_tpot_median_s": Figure("s", False),
            "low_ttft_p99_s": Figure("s", False),
            "low_tpot_median_s": Figure("s", False),
        }
    )

    @property
    def lengths(self) -> dict[str, Any]:
        return {"requests": self.requests, "prompt": self.prompt, "output": self.output}

    def at(self, rate: float) -> Arrivals:
        return replace(self, half_rate=rate)

    def plan(self, prompts: Prompts) -> Plan:
        return [self._arriving(prompts, rate) for rate in (self.half_rate, self.low_rate)]

    async def run(self, caller: Caller, plan: Plan) -> Figures:
        found: Figures = {}
        for name, asks in zip(("half", "low"), plan, strict=True):
            answers = await caller.all(asks)
            found[f"{name}_ttft_p99_s"] = quantile([answer.ttft for answer in answers], 0.99)
            found[f"{name}_tpot_median_s"] = median(answer.tpot for answer in answers)
        return found

    def _arriving(self, prompts: Prompts, rate: float) -> list[Ask]:
        times = accumulate(prompts.gaps(rate, self.requests))
        return [Ask(prompts.draw(self.prompt), self.output, at) for at in times]


def elapsed(answers: Sequence[Answer]) -> float:
    """Seconds from when the first was due to the last token of all."""
    return max(answer.last for answer in answers) - min(answer.due for answer in answers)


def batch_of_equal(*, quick: bool) -> Batch:
    """W3 with equal lengths, which also says what half a capacity is."""
    requests, prompt, output = (8, 64, 16) if quick else (32, 128, 64)
    return Batch("w3_equal", requests, (prompt, prompt), (output, output))


MAKERS: Mapping[str, Callable[[bool], Workload]] = {
    "w1": lambda quick: SingleStream(64, 32) if quick else SingleStream(128, 128),
    "w2": lambda quick: Prefill(256 if quick else 1024),
    "w3_equal": lambda quick: batch_of_equal(quick=quick),
    "w3_mixed": lambda quick: (
        Batch("w3_mixed", 8, (16, 128), (8, 32)) if quick else Batch("w3_mixed", 32, (32, 512), (16, 128))
    ),
    "w4": lambda quick: SharedPrefix(8, 128, 32, 8, 256, 64) if quick else SharedPrefix(32, 512, 32, 32, 1024, 64),
    "w5": lambda quick: Arrivals(6, 64, 16) if quick else Arrivals(24, 128, 64),
}
"""By name, each made for a quick run or a full one."""
LONGEST = 1280
"""Tokens of the longest request, with room to spare: what every side is told to hold."""
SEATS = 32
