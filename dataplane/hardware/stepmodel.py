"""A model of step time fitted to measured steps.

Layer: hardware. Pure. t = a + b·tokens + c·pairs + d·context + e·rows, least squares on relative errors: a step that
takes ten times as long may be missed by ten times as much. No coefficient is negative, since no work has a negative
cost; one that would be is left out and the rest fitted again. Every coefficient and every prediction is `calibrated`
and carries the source of its measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dataplane.hardware.figure import Figure, FigureKind
from dataplane.hardware.geometry import StepSize

FEATURES = ("step", "tokens", "pairs", "context", "rows")
"""What a step is charged for: once, and for each of the rest."""


class StepModelError(ValueError):
    """The measured steps cannot tell the features apart; the sentence says what is missing."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step and how long it took."""

    size: StepSize
    seconds: float


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors of a model over `n` steps: |predicted − measured| / measured, and their signed mean."""

    n: int
    median: float
    p90: float
    largest: float
    bias: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step from its size. `residuals` are those of the fit itself: score it on other steps."""

    coefficients: Mapping[str, Figure]
    residuals: Residuals
    largest: StepSize
    """The largest of each measured size: what lies beyond is extrapolated."""
    source: str

    @classmethod
    def fit(cls, steps: Sequence[MeasuredStep], source: str, features: Sequence[str] = FEATURES) -> Self:
        """Raises StepModelError with too few or too uniform steps, or a time that is not positive."""
        if len(steps) < len(features):
            raise StepModelError(f"{len(features)} coefficients need as many steps at least, got {len(steps)}")
        times = np.array([step.seconds for step in steps])
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise StepModelError("every measured step must have taken a positive time")
        matrix = _matrix([step.size for step in steps], features)
        found = _non_negative(matrix / times[:, None], features)
        residuals = _residuals(matrix @ found, times)
        return cls(
            coefficients={
                name: Figure(float(value), f"s/{name}", FigureKind.CALIBRATED, source, len(steps))
                for name, value in zip(features, found, strict=True)
            },
            residuals=residuals,
            largest=StepSize(*(max(getattr(step.size, name) for step in steps) for name in FEATURES[1:])),
            source=source,
        )

    def seconds(self, size: StepSize) -> float:
        """The step's time."""
        return sum(
            figure.value * (1.0 if name == "step" else getattr(size, name))
            for name, figure in self.coefficients.items()
        )

    def predict(self, size: StepSize) -> Figure:
        """The same as a figure with its lineage."""
        beyond = " (extrapolated)" if self.extrapolates(size) else ""
        return Figure(self.seconds(size), "s", FigureKind.CALIBRATED, self.source + beyond, self.residuals.n)

    def extrapolates(self, size: StepSize) -> bool:
        """Whether `size` lies beyond what was measured."""
        return any(getattr(size, name) > getattr(self.largest, name) for name in FEATURES[1:])

    def score(self, steps: Sequence[MeasuredStep]) -> Residuals:
        """How well it does on `steps`, which should not be those it was fitted to."""
        if not steps:
            raise StepModelError("there are no steps to score the model on")
        predicted = np.array([self.seconds(step.size) for step in steps])
        return _residuals(predicted, np.array([step.seconds for step in steps]))


def _matrix(sizes: Sequence[StepSize], features: Sequence[str]) -> NDArray[np.float64]:
    rows = [[1.0 if name == "step" else float(getattr(size, name)) for name in features] for size in sizes]
    return np.array(rows, dtype=np.float64)


def _non_negative(weighted: NDArray[np.float64], features: Sequence[str]) -> NDArray[np.float64]:
    """Least squares of weighted · x = 1 with x ≥ 0, leaving out the most negative coefficient in turn."""
    scale = np.abs(weighted).max(axis=0)
    if (scale == 0).any():
        missing = [name for name, size in zip(features, scale, strict=True) if size == 0]
        raise StepModelError(f"no measured step has any {', '.join(missing)}")
    scaled, target = weighted / scale, np.ones(len(weighted))
    if np.linalg.matrix_rank(scaled) < len(features):
        raise StepModelError(f"the measured steps do not tell {', '.join(features)} apart: vary them independently")
    used = list(range(len(features)))
    while True:
        solution = np.linalg.lstsq(scaled[:, used], target, rcond=None)[0]
        if len(used) == 1 or solution.min() >= 0:
            break
        used.pop(int(solution.argmin()))
    found = np.zeros(len(features))
    found[used] = np.maximum(solution, 0.0)
    return found / scale  # type: ignore[no-any-return]


def _residuals(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> Residuals:
    signed = predicted / measured - 1.0
    errors = np.abs(signed)
    return Residuals(
        n=len(measured),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        largest=float(errors.max()),
        bias=float(signed.mean()),
    )
