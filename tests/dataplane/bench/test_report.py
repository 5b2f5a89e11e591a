"""A report prints, and writes what a later run needs to know whether it may be compared."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from dataplane.bench.report import Report, Table, case_id, emit


def report() -> Report:
    made = Report("sample", {"prompt": 64, "model": "m"}, seed=3)
    made.tables.append(Table("Things", ("thing", "ms"), (("one", "1.5"), ("two", "2.5")), "Read it so."))
    made.results["one_s"] = 0.0015
    return made


def test_tables_notes_and_the_case_are_printed() -> None:
    out = io.StringIO()
    emit(report(), console=Console(file=out))
    text = out.getvalue()
    assert all(part in text for part in ("Things", "one", "2.5", "Read it so.", "seed 3", "cores"))
    assert case_id("sample", {"model": "m", "prompt": 64}) in text


def test_the_file_carries_machine_versions_case_and_results(tmp_path: Path) -> None:
    emit(report(), tmp_path / "new" / "r.json", Console(file=io.StringIO()))
    document = json.loads((tmp_path / "new" / "r.json").read_text())
    assert set(document) == {"bench", "case", "case_id", "seed", "machine", "versions", "results", "tables"}
    assert document["machine"]["cores"] >= 1
    assert {"cpu", "memory_bytes", "load"} <= set(document["machine"])
    assert {"torch", "numpy"} <= set(document["versions"])
    assert document["results"] == {"one_s": 0.0015}
    assert document["tables"][0]["rows"] == [["one", "1.5"], ["two", "2.5"]]


def test_one_knob_makes_another_case() -> None:
    case = {"prompt": 64, "model": "m"}
    assert case_id("a", case) == case_id("a", dict(reversed(case.items())))
    assert len({case_id("a", case), case_id("a", {**case, "prompt": 65}), case_id("b", case)}) == 3
