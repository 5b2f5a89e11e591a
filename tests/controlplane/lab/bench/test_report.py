"""A report prints and writes what the dataplane's benches do, and carries what it depended on."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from controlplane.lab.bench.report import Report, Section, Table, case_id, emit
from dataplane.bench import report as dataplane_report


def report() -> Report:
    made = Report("sample", {"quick": True, "parts": ["a"]}, seed=3, tools={"wrk": "4.1"})
    made.take(Section([Table("Things", ("thing", "ms"), (("one", "1.5"),), "Read it so.")], {"one_ms": 1.5}))
    return made


def test_it_prints_its_tables_and_its_case() -> None:
    out = io.StringIO()
    emit(report(), console=Console(file=out))
    for part in ("Things", "one", "1.5", "Read it so.", "seed 3", "cores", "wrk 4.1"):
        assert part in out.getvalue()


def test_the_file_has_the_keys_and_the_case_id_of_the_dataplanes_benches(tmp_path: Path) -> None:
    emit(report(), tmp_path / "new" / "r.json", Console(file=io.StringIO()))
    document = json.loads((tmp_path / "new" / "r.json").read_text())
    theirs = dataplane_report.document_of(dataplane_report.Report("sample", {"quick": True, "parts": ["a"]}, 3))
    assert set(document) == set(theirs)
    assert set(document["machine"]) == set(theirs["machine"])
    assert document["case_id"] == theirs["case_id"] == case_id("sample", {"parts": ["a"], "quick": True})
    assert document["results"] == {"one_ms": 1.5}
    assert {"uvicorn", "granian", "aiohttp", "wrk", "python"} <= set(document["versions"])
