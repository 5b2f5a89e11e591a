"""What a decode step costs beside the network: scheduling, preparing inputs, choosing tokens and bookkeeping.

Layer: service. One engine core in this process decodes a full batch of requests, in turns with a short and with a long
history; the requests of a turn share their prompt but for its end, so that a long history is computed once. The core's
own counters say where a step's time went. The control is the short history again: its ratio must be about 1.

Keys of `results`: `step_ms`, `host_ms` and its `parts_ms` (schedule, prepare, sample, post), `share` of the step, each
by history (`short`, `long`), medians of turns; `long_over_short` and `control` are ratios of host time, each with
`median`, `lower` and `upper`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dataplane.bench.engine.paired import ratio_of
from dataplane.bench.report import Report, Table
from dataplane.config import ConfigError, EngineConfig
from dataplane.engine import EngineCore
from dataplane.protocol import EngineRequest, SamplingParams

PARTS = ("schedule", "prepare", "sample", "post")
OWN = 32
"""Tokens of a request's prompt that no other shares."""
SPARE = 64
"""Tokens that requests may decode until the last one of a turn has begun."""
BLOCK_SIZE = 16
TURNS = ("short", "long", "control")


@dataclass(frozen=True, slots=True)
class HostCase:
    model: str
    threads: int
    batch: int = 32
    short: int = 64
    long: int = 4096
    """Tokens of a request's history before it decodes."""
    steps: int = 24
    """Decode steps that are measured in a turn."""
    rounds: int = 7
    seed: int = 0
    forward: str = "auto"
    weights: str = "auto"


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds a step of one turn."""

    step: float
    parts: dict[str, float]

    @property
    def host(self) -> float:
        return sum(self.parts.values())


def run(case: HostCase, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Measure. Raises ConfigError when the model cannot have such a history or batch."""
    report = Report("host", asdict(case), case.seed)
    with closing(_core(case)) as core:
        report.results["forward"], report.results["weights"] = core.ready.forward, core.ready.weights
        spent = _measure(core, case, tell)
    for name in ("short", "long"):
        turns = spent[name]
        report.results[name] = {
            "history": getattr(case, name),
            "step_ms": 1e3 * median(one.step for one in turns),
            "host_ms": 1e3 * median(one.host for one in turns),
            "parts_ms": {part: 1e3 * median(one.parts[part] for one in turns) for part in PARTS},
            "share": median(one.host / one.step for one in turns),
        }
    for name, over in (("long_over_short", "long"), ("control", "control")):
        ratio = ratio_of([one.host for one in spent[over]], [one.host for one in spent["short"]], more_is_better=True)
        report.results[name] = {"median": ratio.median, "lower": ratio.lower, "upper": ratio.upper}
    report.tables.append(_table(case, report.results))
    return report


def _core(case: HostCase) -> EngineCore:
    if not OWN < case.short <= case.long:
        raise ConfigError(f"a history must be longer than {OWN} tokens, and the long one no shorter than the short one")
    longest = case.long + case.steps + SPARE
    own = -(-(OWN + case.steps + SPARE) // BLOCK_SIZE) + 1
    config = EngineConfig.resolve(
        case.model,
        forward=case.forward,
        weights=case.weights,
        threads=case.threads,
        block_size=BLOCK_SIZE,
        max_num_seqs=case.batch,
        max_model_len=longest,
        num_blocks=2 * -(-longest // BLOCK_SIZE) + 2 * len(TURNS) * case.batch * own,
    )
    return EngineCore(config)


def _measure(core: EngineCore, case: HostCase, tell: Callable[[str], None]) -> dict[str, list[Spent]]:
    rng = random.Random(case.seed)  # noqa: S311 - prompts are no secret
    vocab = core.config.model.shape.vocab
    shared = {name: [rng.randrange(vocab) for _ in range(getattr(case, name) - OWN)] for name in ("short", "long")}
    spent: dict[str, list[Spent]] = {name: [] for name in TURNS}
    for number in range(case.rounds + 1):  # the first warms up, and computes what is shared
        order = [*TURNS]
        rng.shuffle(order)
        for name in order:
            tell(f"round {number} of {case.rounds}, {name}")
            prefix = shared["long" if name == "long" else "short"]
            prompts = [[*prefix, *(rng.randrange(vocab) for _ in range(OWN))] for _ in range(case.batch)]
            one = _turn(core, prompts, case.steps)
            if number:
                spent[name].append(one)
    return spent


def _turn(core: EngineCore, prompts: list[list[int]], steps: int) -> Spent:
    """Decode `prompts` together; the seconds of a step in which all of them take part."""
    params = SamplingParams(max_tokens=steps + SPARE, temperature=0.0, ignore_eos=True)
    names = [f"row-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrived_at=0.0))
    try:
        begun: set[str] = set()
        while len(begun) < len(names):
            begun.update(output.request_id for output in core.step() if output.token_ids)
        before = core.stats().counters.runtime
        for _ in range(steps):
            core.step()
        after = core.stats().counters.runtime
    finally:
        core.abort(names)
        while core.has_work():
            core.step()
    assert before.step_time is not None and after.step_time is not None, "a core counts its steps"
    parts = {part: (getattr(after, f"{part}_s") - getattr(before, f"{part}_s")) / steps for part in PARTS}
    return Spent((after.step_time.total - before.step_time.total) / steps, parts)


def _table(case: HostCase, results: dict[str, Any]) -> Table:
    rows = []
    for name in ("short", "long"):
        found = results[name]
        parts = (f"{found['parts_ms'][part]:.2f}" for part in PARTS)
        rows.append(
            (f"{found['history']:,} tokens", f"{found['step_ms']:.1f}", f"{found['host_ms']:.2f}", *parts,
             f"{100 * found['share']:.2f} %")
        )  # fmt: skip
    long, control = (_interval(results[name]) for name in ("long_over_short", "control"))
    return Table(
        f"A decode step of {case.batch} requests, {results['forward']} with {results['weights']} weights, ms",
        ("history", "step", "host", *PARTS, "host share"),
        tuple(rows),
        note=f"Host time is everything but the network. Its ratio in {case.rounds} rounds: long over short history "
        f"{long}; short over short, the control, {control}.",
    )


def _interval(ratio: dict[str, float | None]) -> str:
    if ratio["lower"] is None:
        return f"{ratio['median']:.2f}"
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})"
