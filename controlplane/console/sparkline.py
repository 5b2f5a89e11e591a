"""Small line drawings of a series, as SVG path data.

Layer: service. Pure geometry: a None in the series is a gap in the line, never a zero and never bridged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 120.0
HEIGHT = 28.0
PAD = 2.0


@dataclass(frozen=True, slots=True)
class Sparkline:
    """`lines` are SVG path data, one per unbroken run; `dots` are lone points with a gap on both sides."""

    lines: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    width: float = WIDTH
    height: float = HEIGHT


def sparkline(values: Sequence[float | None]) -> Sparkline | None:
    """The drawing of `values` between 0 and their maximum; None when there is nothing to draw."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    top = max(known) or 1.0
    step = (WIDTH - 2 * PAD) / max(1, len(values) - 1)
    runs: list[list[tuple[float, float]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((PAD + index * step, HEIGHT - PAD - (HEIGHT - 2 * PAD) * value / top))
    return Sparkline(
        lines=tuple("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs if len(run) > 1),
        dots=tuple((round(run[0][0], 1), round(run[0][1], 1)) for run in runs if len(run) == 1),
    )
