"""Nothing is faster than its roofline: measurements that claim to be are thrown out before anything is fitted to them.

Layer: hardware. Pure. A published kernel table once implied 47 times the peak FLOP/s of its device: a loader without
this check would have fitted a cost model to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from dataplane.hardware.costmodel import Ceilings, Op


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured operator: `label` finds the row again. `least` is work that any run of it must do.

    `model` is what the cost model expects, where that rests on an assumption the row may not share (which experts
    are touched); it is the same as `least` otherwise.
    """

    label: str
    seconds: float
    least: tuple[Op, ...]
    model: tuple[Op, ...] = ()

    @property
    def expected(self) -> tuple[Op, ...]:
        return self.model or self.least


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row the gate threw out. `ratio` is roofline over measured: above 1 is impossible."""

    label: str
    ratio: float
    reason: str


@dataclass(frozen=True, slots=True)
class Gated:
    """What passed, and what did not."""

    kept: tuple[Measured, ...]
    dropped: tuple[Dropped, ...]

    @property
    def reasons(self) -> Counter[str]:
        return Counter(row.reason for row in self.dropped)


NOT_A_TIME = "its time is not a positive number"
IN_CACHE = "its working set fits in the last cache, so that memory does not bound it"
OVER_COMPUTE = "it would beat the peak FLOP/s"
OVER_BANDWIDTH = "it would beat the memory bandwidth"
OVER_BOTH = "its operators would have to overlap"


def gate(rows: Iterable[Measured], ceilings: Ceilings, *, cache_bytes: float = 0.0) -> Gated:
    """Keep the rows that are not faster than `ceilings` allow.

    The operators of a row run after one another, each at its own roofline. A row beyond the bandwidth whose bytes
    fit in `cache_bytes` is dropped as well: it is no lie, and no measurement of memory either.
    """
    kept: list[Measured] = []
    dropped: list[Dropped] = []
    for row in rows:
        reason, ratio = _fault(row, ceilings, cache_bytes)
        if reason:
            dropped.append(Dropped(row.label, ratio, reason))
        else:
            kept.append(row)
    return Gated(tuple(kept), tuple(dropped))


def _fault(row: Measured, ceilings: Ceilings, cache_bytes: float) -> tuple[str, float]:
    if not (math.isfinite(row.seconds) and row.seconds > 0):
        return NOT_A_TIME, math.inf
    ratio = ceilings.seconds(row.least) / row.seconds
    if ratio <= 1.0:
        return "", ratio
    if sum(ceilings.compute_s(op) for op in row.least) > row.seconds:
        return OVER_COMPUTE, ratio
    if sum(op.bytes for op in row.least) <= cache_bytes:
        return IN_CACHE, ratio
    return (OVER_BANDWIDTH if sum(map(ceilings.memory_s, row.least)) > row.seconds else OVER_BOTH), ratio


def violations(rows: Iterable[Measured], ceilings: Ceilings) -> int:
    """Rows that claim more FLOP/s, or more bytes/s, than `ceilings` have, and those without a time.

    It takes a row's totals over its time and asks nothing of the gate, which it checks: 0 of what that kept. What it
    finds under ceilings that are too low shows that it can find something.
    """
    return sum(not 0.0 < row.seconds < math.inf or _claimed(row, ceilings) > 1.0 for row in rows)


def _claimed(row: Measured, ceilings: Ceilings) -> float:
    """Rate over ceiling, of compute or of memory, whichever is more."""
    compute, memory = (sum(map(part, row.least)) for part in (ceilings.compute_s, ceilings.memory_s))
    return max(compute, memory) / row.seconds


def ratios(rows: Iterable[Measured], ceilings: Ceilings) -> list[float]:
    """Expected over measured time of each row: 1 is a perfect model, above 1 the model asks for too much."""
    return [ceilings.seconds(row.expected) / row.seconds for row in rows]


@dataclass(frozen=True, slots=True)
class Reached:
    """How much of the ceilings a set of rows reaches, and what it takes besides: the medians of a fit.

    `error` is the median of |expected/measured − 1| over rows that were not fitted to.
    """

    flops_share: float
    bandwidth_share: float
    launch_s: float
    error: float
    n: int


def calibrate(rows: Iterable[Measured], ceilings: Ceilings, *, small_s: float = 5e-5) -> Reached:
    """η_F and η_W as medians over rows of more than `small_s` under each side of the roofline, the launch as the
    median time of rows of less than a tenth of it; fitted to every other row and scored on the rest.

    Raises ValueError with fewer than two rows. A share nobody shows is 1, a launch nobody shows 0.
    """
    everything = list(rows)
    fitted, held = everything[::2], everything[1::2]
    if not held:
        raise ValueError("a calibration needs at least two rows: one to fit and one to score")
    compute: list[float] = []
    memory: list[float] = []
    tiny: list[float] = []
    for row in fitted:
        least = ceilings.seconds(row.expected)
        if least >= small_s:
            bound = sum(map(ceilings.compute_s, row.expected)) > sum(map(ceilings.memory_s, row.expected))
            (compute if bound else memory).append(least / row.seconds)
        elif least <= small_s / 10:
            tiny.append((row.seconds - least) / max(1, len(row.expected)))
    reached = Reached(
        flops_share=min(1.0, median(compute)) if compute else 1.0,
        bandwidth_share=min(1.0, median(memory)) if memory else 1.0,
        launch_s=max(0.0, median(tiny)) if tiny else 0.0,
        error=0.0,
        n=len(fitted),
    )
    derated = ceilings.derated(
        flops_share=reached.flops_share,
        bandwidth_share=reached.bandwidth_share,
        launch_s=reached.launch_s,
        kind=ceilings.kind,
        source=ceilings.source,
    )
    error = median(abs(ratio - 1.0) for ratio in ratios(held, derated))
    return Reached(reached.flops_share, reached.bandwidth_share, reached.launch_s, error, reached.n)
