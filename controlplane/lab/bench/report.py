"""What a bench of the control plane found: tables for people, and the same as JSON for the next run to compare with.

Layer: service. The same look and the same keys as the dataplane's benches, without anything that could load torch. It
describes the machine and prints; it measures nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

PACKAGES = ("tidegate", "litestar", "uvicorn", "httptools", "granian", "aiohttp", "msgspec", "redis", "uvloop")
FILE_WIDTH = 160
"""Columns where the output is no terminal."""
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are printed as they are: each carries its unit, or its column does. `note` says how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """What one part of a bench found."""

    tables: list[Table] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def machine() -> dict[str, Any]:
    """Where it ran, and how busy that was: `load` is the one-minute average, which should be near 0 before a bench."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


@dataclass(slots=True)
class Report:
    """A bench's outcome. `case` is all that shaped it; `results` are plain numbers, texts, lists and mappings.

    Make it before measuring: `machine` holds the load of that moment. `tools` are versions of programs that are no
    Python package.
    """

    name: str
    case: Mapping[str, Any]
    seed: int
    tables: list[Table] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=machine)
    tools: dict[str, str] = field(default_factory=dict)

    def take(self, section: Section) -> None:
        """Add what a part found."""
        self.tables += section.tables
        self.results |= section.results


def emit(report: Report, json_path: Path | None = None, console: Console | None = None) -> None:
    """Print the tables; with `json_path`, write a file as well.

    Its keys: `bench`, `case` and `case_id` (a hash of the case: results of different ids must not be compared unless
    they differ in the one knob that was turned), `seed`, `machine` (cpu, cores, memory_bytes, load), `versions`,
    `results` (documented by each bench), and `tables` as printed.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=FILE_WIDTH)
    for table in report.tables:
        console.print(_rich(table))
        if table.note:
            console.print(table.note, style="dim", highlight=False)
        console.print()
    document = document_of(report)
    where = report.machine
    console.print(
        f"case {document['case_id']}, seed {report.seed}; {where['cpu']}, {where['cores']} cores, "
        f"load {where['load']} at the start; "
        + ", ".join(f"{name} {number}" for name, number in document["versions"].items()),
        highlight=False,
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))


def document_of(report: Report) -> dict[str, Any]:
    """What `emit` writes."""
    return {
        "bench": report.name,
        "case": dict(report.case),
        "case_id": case_id(report.name, report.case),
        "seed": report.seed,
        "machine": report.machine,
        "versions": versions() | report.tools,
        "results": report.results,
        "tables": [msgspec.to_builtins(table) for table in report.tables],
    }


def case_id(name: str, case: Mapping[str, Any]) -> str:
    """Ten hex digits that two runs of one case share."""
    return hashlib.sha256(msgspec.json.encode([name, dict(case)], order="sorted")).hexdigest()[:10]


def versions() -> dict[str, str]:
    """Of what the figures depend on; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _rich(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn
