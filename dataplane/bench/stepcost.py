"""What a step takes on the machine that is simulated.

Layer: service. DistServe's fitted profile (Zhong et al. 2024; LLMServe/DistServe @82831f16): a prefill of prompts n
takes a + b·Σn + c·Σn² milliseconds, a decode of B sequences a' + b'·Σcontext + c'·B, with other coefficients for large
B. One profile serves both sides of every comparison, or a gain might be the kernels' and not the policy's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dataplane.bench.traces import TraceError
from dataplane.scheduling.plan import Plan

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class StepWork:
    """A plan by what the profile charges for: `squares` is Σ((h+n)² − h²) of chunks of n tokens after h."""

    prefill: int
    squares: int
    decodes: int
    context: int

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """A single token costs what a decode does, whosever it is; all else is prefill."""
        total = len(plan.tokens)
        if plan.total_tokens == total:
            return cls(0, 0, total, plan.context)
        chunks = {request_id: count for request_id, count in plan.tokens.items() if count > 1}
        known = {each.request_id: each.computed for each in plan.running if each.request_id in chunks}
        known |= {each.request_id: each.computed for each in plan.new if each.request_id in chunks}
        squares = sum(count * (2 * known[request_id] + count) for request_id, count in chunks.items())
        prefill = sum(chunks.values())
        read = prefill + sum(known.values())
        return cls(prefill, squares, total - len(chunks), plan.context - read)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds from work.

    DistServe runs prefill and decode apart, so the profile says nothing of a step that holds both. Here its parts add
    up, but for the fixed one, mostly the reading of weights, which such a step does once: max(a, a'). Chunks of a
    prompt have the same Σ of squares as the whole, so that to chunk costs a further `a` for each step and nothing else.
    """

    prefill: Coefficients
    decode_small: Coefficients
    decode_large: Coefficients
    threshold: int
    """The largest batch of `decode_small`."""
    source: str

    def prefill_ms(self, work: StepWork) -> float:
        """What the profile charges for the prefill of a step alone."""
        fixed, linear, quadratic = self.prefill
        return fixed + linear * work.prefill + quadratic * work.squares if work.prefill else 0.0

    def decode_ms(self, work: StepWork) -> float:
        """What the profile charges for the decodes of a step alone."""
        fixed, context, each = self.decode_small if work.decodes <= self.threshold else self.decode_large
        return fixed + context * work.context + each * work.decodes if work.decodes else 0.0

    def seconds(self, work: StepWork) -> float:
        """The step's time."""
        shared = 0.0
        if work.prefill and work.decodes:
            decode = self.decode_small if work.decodes <= self.threshold else self.decode_large
            shared = min(self.prefill[0], decode[0])
        return (self.prefill_ms(work) + self.decode_ms(work) - shared) / 1000

    @classmethod
    def read(cls, path: Path, model: str = "facebook/opt-13b", parallel: str = "1") -> Self:
        """From a profile of DistServe's (JSON). Raises TraceError when it is none or has no such model."""
        try:
            with path.open("rb") as file:
                profile = json.loads(file.read(1 << 20))[model][parallel]
            return cls(
                prefill=_three(profile["prefill"]),
                decode_small=_three(profile["decoding_smallbs"]),
                decode_large=_three(profile["decoding_largebs"]),
                threshold=int(profile["decoding_large_small_bs_threshold"]),
                source=f"{path.name}: {model}, {parallel} GPU",
            )
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise TraceError(f"{path}: no profile of {model} on {parallel} GPU is in it ({error})") from None


def _three(numbers: Any) -> Coefficients:
    first, second, third = (float(number) for number in numbers)
    if not all(0 <= number < 1e6 for number in (first, second, third)):
        raise ValueError(f"{first}, {second}, {third} are no coefficients of a time")
    return first, second, third


OPT_13B_A100 = StepCost(
    prefill=(18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
    decode_small=(19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
    decode_large=(7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
    threshold=95,
    source="DistServe, profiler-a100-80g.distserve.json @82831f16: facebook/opt-13b, 1 GPU",
)
"""The default."""
