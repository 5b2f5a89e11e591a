"""The engine that can be killed: its own count outlives it, whatever happens to clients."""

from __future__ import annotations

from pathlib import Path

from controlplane.lab.bench.engine_report import Identity
from controlplane.lab.chaos.engine import RecordedBook, read_records

WHO = Identity(replica="r", pool="p", model="m", url="http://127.0.0.1:1")


def test_a_killed_engine_tells_all_its_records_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    book = RecordedBook(WHO, path)
    for number in range(3):
        book.add(b"\r\n", f"attempt-{number}", 500, number, 1.0)
    book.acknowledge(["attempt-0"])
    again = RecordedBook(WHO, path)  # nothing was closed or flushed
    assert [record.attempt_id for record in again.batch()] == ["attempt-0", "attempt-1", "attempt-2"]
    assert [record.output_tokens for record in read_records(path)] == [0, 1, 2]


def test_a_line_that_a_kill_cut_short_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    RecordedBook(WHO, path).add(b"\r\n", "whole", 500, 1, 1.0)
    with path.open("ab") as file:
        file.write(b'{"attempt_id":"half')
    assert [record.attempt_id for record in read_records(path)] == ["whole"]
    RecordedBook(WHO, path).add(b"\r\n", "next", 500, 1, 1.0)
    assert [record.attempt_id for record in read_records(path)] == ["whole", "next"]
    assert read_records(tmp_path / "none") == []
