"""A figure that knows where it comes from (DESIGN §1.6).

Layer: hardware. Pure. Figures have no arithmetic, so that one kind is never mixed with another by accident: whoever
computes takes the values, and says what came of it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FigureKind(enum.StrEnum):
    """Read from a shape or a data sheet; fitted to measurements, hence a prediction; or measured."""

    CONFIGURED = "configured"
    CALIBRATED = "calibrated"
    OBSERVED = "observed"


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` in `unit`; `source` names data sheet, fit or measurement, `n` the measurements behind it."""

    value: float
    unit: str
    kind: FigureKind
    source: str
    n: int | None = None
