"""Rounds of one load at one target, which take turns with those at others.

Layer: service. Pure. It keeps what each round found; it loads nothing and measures nothing.
"""

from __future__ import annotations

import statistics

from controlplane.lab.bench.case import whole
from controlplane.lab.bench.requests import Target


class Rounds:
    """What each round at `target`, served by `pid` and its children, found: figures by name, the same each time."""

    def __init__(self, target: Target, pid: int) -> None:
        self.target = target
        self.pid = pid
        self._found: dict[str, list[float]] = {}

    def add(self, **figures: float) -> None:
        """One more round."""
        for name, figure in figures.items():
            self._found.setdefault(name, []).append(figure)

    def median(self, name: str) -> float:
        """Raises KeyError for a figure that no round had."""
        return statistics.median(self._found[name])

    def spread(self, name: str) -> str:
        """The least and the most, in whole numbers."""
        return f"{whole(min(self._found[name]))} to {whole(max(self._found[name]))}"
