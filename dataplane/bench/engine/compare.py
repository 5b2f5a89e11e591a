"""An earlier result beside this one, when nothing but one knob was turned.

Layer: service. It reads a result and refuses those of another case; it measures nothing. Two runs are not side by
side: what disturbed one of them shows in the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dataplane.bench.engine.case import require_same_case
from dataplane.bench.engine.findings import TITLES
from dataplane.bench.errors import CaseError
from dataplane.bench.report import Report, Table

COLUMNS = ("load", "figure", "then", "now", "now / then")


def compare_with(path: Path, report: Report, knob: str) -> Table:
    """Our figures then and now. Raises CaseError when the cases differ in more than `knob`, or `path` is no result."""
    try:
        old = msgspec.json.decode(path.read_bytes())
        case, results = old["case"], old["results"]
        if old["bench"] != report.name:
            raise CaseError(f"{path.name} is a result of the bench {old['bench']}")
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise CaseError(f"{path.name} is no result of this bench: {error}") from None
    # As written: what JSON makes of the case is what is compared.
    require_same_case(case, msgspec.json.decode(msgspec.json.encode(report.case)), knob)
    then, now = ours_in(results), ours_in(report.results)
    rows = [
        (TITLES[load], figure, f"{then[load, figure]:.4g}", f"{value:.4g}", f"{value / then[load, figure]:.3f}×")
        for (load, figure), value in now.items()
        if (load, figure) in then
    ]
    return Table(f"Beside {path.name}", COLUMNS, tuple(rows), f"The knob: {knob or 'none'}. Not measured in turns.")


def ours_in(results: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Our figures by load and name: of a run alone, or beside the first peer that was measured."""
    against = results.get("against", {})
    loads: Mapping[str, Any] = results.get("ours") or next(
        (found for found in against.values() if any(name in found for name in TITLES)), {}
    )
    return {
        (load, name): figure["ours"]
        for load, result in loads.items()
        if load in TITLES and "figures" in result
        for name, figure in result["figures"].items()
    }
