"""What the turns found, as results and as tables.

Layer: service. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dataplane.bench.engine.paired import Ratio, ratio_of
from dataplane.bench.engine.turns import OURS, PEER, Measured
from dataplane.bench.engine.workloads import Figure, Figures, Workload
from dataplane.bench.report import Table

TITLES: Mapping[str, str] = {
    "w1": "single stream",
    "w2": "prefill",
    "w3_equal": "batch, equal lengths",
    "w3_mixed": "batch, mixed lengths",
    "w4": "shared prefix",
    "w5": "Poisson arrivals",
}
COLUMNS = ("load", "figure", "ours", "theirs", "ours is better", "95 % interval", "pairs")


def compared(workload: Workload, measured: Measured) -> dict[str, Any]:
    """`figure`, `unit`, `ours`, `peer` (medians), `ratio`, `ratio_lower`, `ratio_upper`, `confidence` and `pairs` of
    the load's first figure; the same by name for all of them under `figures`; `idle_share`, `order`."""
    found = {
        name: _figure(name, figure, measured.figures[OURS], measured.figures[PEER])
        for name, figure in workload.figures.items()
    }
    return {**next(iter(found.values())), "figures": found, **_turns(measured)}


def alone(workload: Workload, measured: Measured) -> dict[str, Any]:
    """`figure`, `unit` and `ours` of the first figure, all of them under `figures`."""
    found = {
        name: {"figure": name, "unit": figure.unit, "ours": _median(name, measured.figures[OURS])}
        for name, figure in workload.figures.items()
    }
    return {**next(iter(found.values())), "figures": found, "pairs": len(measured.figures[OURS])}


def table_of(peer: str, found: Mapping[str, Mapping[str, Any]], note: str) -> Table:
    """`found` by load, as `compared` gives it."""
    rows = [
        (TITLES[name], figure["figure"], *_cells(figure))
        for name, result in found.items()
        for figure in result["figures"].values()
    ]
    return Table(f"Beside {peer}", COLUMNS, tuple(rows), note)


def table_alone(found: Mapping[str, Mapping[str, Any]], note: str) -> Table:
    rows = [
        (TITLES[name], figure["figure"], _shown(figure["ours"], figure["unit"]))
        for name, result in found.items()
        for figure in result["figures"].values()
    ]
    return Table("The engine alone", COLUMNS[:3], tuple(rows), note)


def _figure(name: str, figure: Figure, ours: Sequence[Figures], peer: Sequence[Figures]) -> dict[str, Any]:
    mine, theirs = [turn[name] for turn in ours], [turn[name] for turn in peer]
    ratio: Ratio = ratio_of(mine, theirs, more_is_better=figure.more_is_better)
    return {
        "figure": name,
        "unit": figure.unit,
        "ours": median(mine),
        "peer": median(theirs),
        "ratio": ratio.median,
        "ratio_lower": ratio.lower,
        "ratio_upper": ratio.upper,
        "confidence": ratio.confidence,
        "pairs": ratio.n,
    }


def _turns(measured: Measured) -> dict[str, Any]:
    return {"idle_share": round(measured.idle_share, 4), "order": list(measured.order)}


def _median(name: str, turns: Sequence[Figures]) -> float:
    return median(turn[name] for turn in turns)


def _cells(figure: Mapping[str, Any]) -> tuple[str, ...]:
    lower, upper = figure["ratio_lower"], figure["ratio_upper"]
    interval = "too few pairs" if lower is None else f"{lower:.3f} to {upper:.3f}"
    sides = (_shown(figure["ours"], figure["unit"]), _shown(figure["peer"], figure["unit"]))
    return (*sides, f"{figure['ratio']:.3f}×", interval, str(figure["pairs"]))


def _shown(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}".rstrip()
