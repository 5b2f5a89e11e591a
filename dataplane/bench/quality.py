"""What weights in fewer bits cost in quality: each format beside float32 arithmetic on the same weights, on one text.

Layer: service. All formats and one reference compute the same tokens of the same text, chunk by chunk, so that every
figure is of pairs and only one chunk's logits are held; together they take the memory of about three float32 models.
The control is float32 run by the kernels instead of torch: it must show nothing.

Keys of `results`, for each row: `perplexity`; `perplexity_change` against eager float32 and its standard error
`perplexity_error`, both as ratios (0.01 is one per cent); `agreement`, the share of positions with the same likeliest
token; `divergence`, the mean KL divergence from float32 in nats; `worst_logit`, the largest difference of one logit;
`weight_bytes`; `bar`, the largest change that is accepted, and `holds`. `tokens` is how many were scored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from dataplane.bench.report import Report, Table
from dataplane.config import ConfigError, EngineConfig, ForwardKind, WeightFormat
from dataplane.models.weight_format import holds_blocks
from dataplane.protocol import SamplingParams
from dataplane.runtime.model_runner import ModelRunner
from dataplane.scheduling.plan import NewRequest, Plan, RunningRequest
from dataplane.tokenizer import load_tokenizer

BARS = {
    WeightFormat.FLOAT32: 0.0001,
    WeightFormat.BLOCKS: 0.005,
    WeightFormat.INT8: 0.01,
    WeightFormat.INT4: 0.06,
}
"""By how much the perplexity may change."""
CHUNK = 128
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class QualityCase:
    model: str
    threads: int
    tokens: int = 0
    """How many of the text's tokens are scored; 0 is all, up to the model's context."""
    text: str = ""
    """What is scored; empty is the text that comes with the package."""


@dataclass(slots=True)
class Scores:
    """Sums over the positions of the text, of one engine beside the reference."""

    losses: list[Tensor] = field(default_factory=list)
    changes: list[Tensor] = field(default_factory=list)
    agreed: int = 0
    divergence: float = 0.0
    worst: float = 0.0

    def take(self, ours: Tensor, theirs: Tensor, targets: Tensor) -> None:
        """Logits [n, vocab] of both, and the tokens [n] that follow."""
        self.worst = max(self.worst, float((ours - theirs).abs().max()))
        self.agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        ours, theirs = (torch.log_softmax(logits.double(), -1) for logits in (ours, theirs))
        self.divergence += float((theirs.exp() * (theirs - ours)).sum())
        loss, expected = (-logits.gather(1, targets[:, None]).squeeze(1) for logits in (ours, theirs))
        self.losses.append(loss)
        self.changes.append(loss - expected)

    def results(self) -> dict[str, Any]:
        losses, changes = torch.cat(self.losses), torch.cat(self.changes)
        count = len(losses)
        return {
            "tokens": count,
            "perplexity": math.exp(float(losses.mean())),
            "perplexity_change": math.expm1(float(changes.mean())),
            "perplexity_error": float(changes.std()) / count**0.5,
            "agreement": self.agreed / count,
            "divergence": self.divergence / count,
            "worst_logit": self.worst,
        }


def run(case: QualityCase, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Measure every format that the model can have. Raises ConfigError where kernels or text are missing."""
    text = case.text or files("dataplane.bench").joinpath("quality.txt").read_text(encoding="utf-8")
    reference = _config(case, ForwardKind.EAGER, WeightFormat.FLOAT32)
    tokens = load_tokenizer(reference.model.path).encode(text)[: case.tokens or None]
    tokens = tokens[: min(len(tokens), reference.model.shape.longest)]
    if len(tokens) < 2:
        raise ConfigError(f"a text of {len(tokens)} tokens has nothing to be scored")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    report = Report("quality", {**asdict(case), "text": digest, "scored": len(tokens) - 1}, seed=0)
    formats = [one for one in WeightFormat if one is not WeightFormat.BLOCKS or holds_blocks(reference.model.path)]
    report.results |= _compare(case, formats, tokens, tell)
    report.tables.append(_table(report.results))
    return report


def _compare(
    case: QualityCase, formats: Sequence[WeightFormat], tokens: list[int], tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Each format's figures."""
    scores = {weights: Scores() for weights in formats}
    with ExitStack() as stack:

        def runner(forward: ForwardKind, weights: WeightFormat) -> ModelRunner:
            return stack.enter_context(closing(ModelRunner(_config(case, forward, weights, len(tokens)), lambda: 0.0)))

        reference = runner(ForwardKind.EAGER, WeightFormat.FLOAT32)
        ours = {weights: runner(ForwardKind.CAPTURED, weights) for weights in formats}
        chunks = zip(_logits(reference, tokens), *(_logits(one, tokens) for one in ours.values()), strict=True)
        for start, (expected, *found) in zip(range(0, len(tokens), CHUNK), chunks, strict=True):
            targets = torch.tensor(tokens[start + 1 : start + 1 + len(expected)])
            for score, logits in zip(scores.values(), found, strict=True):
                if len(targets):
                    score.take(logits[: len(targets)], expected[: len(targets)], targets)
            tell(f"{start + len(expected):,} of {len(tokens):,} tokens")
        sizes = {weights: one.forward.facts.weight_bytes for weights, one in ours.items()}
    results = {}
    for weights, score in scores.items():
        figures = score.results() | {"weight_bytes": sizes[weights], "bar": BARS[weights]}
        results[weights.value] = figures | {"holds": abs(figures["perplexity_change"]) <= BARS[weights]}
    return results


def _config(case: QualityCase, forward: ForwardKind, weights: WeightFormat, length: int = 0) -> EngineConfig:
    sizes: dict[str, Any] = {"max_model_len": length, "num_blocks": -(-length // BLOCK_SIZE) + 2} if length else {}
    return EngineConfig.resolve(
        case.model,
        forward=forward,
        weights=weights,
        threads=case.threads,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        **sizes,
    )


def _logits(runner: ModelRunner, tokens: list[int]) -> Iterator[Tensor]:
    """Logits of every position, a chunk at a time; gone when the next are made."""
    blocks = list(range(1, -(-len(tokens) // BLOCK_SIZE) + 1))
    new = NewRequest("text", tokens, len(tokens), SamplingParams(), 0, (), blocks, 0)
    for start in range(0, len(tokens), CHUNK):
        count = min(CHUNK, len(tokens) - start)
        first = start == 0
        plan = Plan(
            1,
            {"text": count},
            frozenset(),
            new=(new,) if first else (),
            running=() if first else (RunningRequest("text", [], start),),
        )
        runner.batch.update(plan)
        planned = runner.forward.plan(runner.batch.gather(plan))
        planned.run()
        yield planned.logits(torch.arange(count))


def _table(results: dict[str, Any]) -> Table:
    rows = tuple(
        (
            weights,
            f"{found['weight_bytes'] / 2**20:.0f} MiB",
            f"{found['perplexity']:.3f}",
            f"{100 * found['perplexity_change']:+.2f} ± {100 * found['perplexity_error']:.2f} %",
            f"{100 * found['bar']:g} %",
            "yes" if found["holds"] else "no",
            f"{100 * found['agreement']:.2f} %",
            f"{found['divergence']:.2e}",
            f"{found['worst_logit']:.2g}",
        )
        for weights, found in results.items()
    )
    return Table(
        "Weights in fewer bits, against eager float32 on the same checkpoint",
        ("weights", "size", "perplexity", "change", "bar", "holds", "same token", "KL, nats", "worst logit"),
        rows,
        note="± is one standard error of the paired difference. float32 is the control: kernels instead of torch.",
    )
