"""`tidegate bench scheduler`: what each scheduling idea gains, what it costs, and where it gains nothing.

Layer: service. It puts the parts together; each says in its own module which knob it turns and what its control is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from dataplane.bench.report import Report, Table
from dataplane.bench.scheduling.batching import batching
from dataplane.bench.scheduling.cache import cache
from dataplane.bench.scheduling.capacity import capacity
from dataplane.bench.scheduling.case import Experiment, SchedulerCase
from dataplane.bench.scheduling.chunking import chunking
from dataplane.bench.scheduling.fairness import fairness
from dataplane.bench.scheduling.overhead import overhead
from dataplane.bench.stepcost import OPT_13B_A100, StepCost
from dataplane.bench.traces import TraceMissingError, Traces

EXPERIMENTS: dict[str, Experiment] = {
    "overhead": overhead,  # first: memory that another part has freed would hide a leak
    "batching": batching,
    "capacity": capacity,
    "chunking": chunking,
    "fairness": fairness,
    "cache": cache,
}


def run(
    trace: Path | None,
    *,
    calibration: Path | None = None,
    only: Collection[str] = (),
    seed: int = 0,
    quick: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Run the parts (`only` those, or all) and say what they found; `tell` hears which one begins.

    `results` has a key for each part, documented by the part's function; one that lacks its trace has
    {"skipped": why}. Raises TraceError when `trace` or `calibration` cannot be read.
    """
    cost = OPT_13B_A100 if calibration is None else StepCost.read(calibration)
    case, traces = SchedulerCase(seed=seed, quick=quick, cost=cost), Traces(trace)
    names = [name for name in EXPERIMENTS if not only or name in only]
    report = Report(
        "scheduler",
        {"parts": names, "traces": trace.name if trace else "none", "quick": quick, "seed": seed, "cost": cost.source},
        seed,
    )
    for name in names:
        if tell is not None:
            tell(name)
        try:
            section = EXPERIMENTS[name](case, traces)
        except TraceMissingError as error:
            report.tables.append(Table(f"{name}: skipped", ("why",), ((str(error),),)))
            report.results[name] = {"skipped": str(error)}
            continue
        report.tables += section.tables
        report.results[name] = section.results
    report.tables.append(_cost_table(cost))
    return report


def _cost_table(cost: StepCost) -> Table:
    return Table(
        "What a simulated step takes (ms)",
        ("work", "fixed", "linear", "quadratic or per sequence"),
        (
            ("prefill: tokens, squares", *(f"{number:.4g}" for number in cost.prefill)),
            (f"decode up to {cost.threshold}: context, batch", *(f"{number:.4g}" for number in cost.decode_small)),
            ("decode beyond: context, batch", *(f"{number:.4g}" for number in cost.decode_large)),
        ),
        f"{cost.source}. Scheduler, queue and memory are the engine's own; only the forward pass is simulated.",
    )
