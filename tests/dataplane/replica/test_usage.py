"""The usage journal: what it was given it gives back until acknowledged, whatever happens in between."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dataplane.protocol import UsageBasis, UsageRecord
from dataplane.usage import UsageJournal


def record(name: str) -> UsageRecord:
    return UsageRecord(
        attempt_id=name,
        request_id=f"request-{name}",
        tenant="demo",
        key_id="key",
        pool="pool",
        model="model",
        replica="replica-7",
        started_at=1.0,
        finished_at=2.0,
        finish="stop",
        basis=UsageBasis.ENGINE,
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=5,
    )


def names(journal: UsageJournal) -> list[str]:
    return [kept.attempt_id for kept in journal.batch(1000)]


async def test_records_come_back_after_a_restart_without_any_closing(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path)
    for name in ("a", "b", "c"):
        journal.add(record(name))
    journal.acknowledge(["b"])
    again = UsageJournal(tmp_path)
    # An acknowledged record of a segment still in use may come again; the ledger knows its attempt id.
    assert set(names(again)) >= {"a", "c"}
    assert again.batch(1) == [record("a")]


async def test_a_torn_last_line_is_skipped_and_the_rest_replayed(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path)
    journal.add(record("a"))
    journal.add(record("b"))
    await journal.sync()
    (segment,) = tmp_path.glob("usage-*.jsonl")
    segment.write_bytes(segment.read_bytes()[:-20])
    again = UsageJournal(tmp_path)
    assert names(again) == ["a"]
    assert again.unreadable == 1
    again.add(record("c"))
    assert names(UsageJournal(tmp_path)) == ["a", "c"]


async def test_garbage_in_the_middle_costs_only_its_line(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path)
    journal.add(record("a"))
    (segment,) = tmp_path.glob("usage-*.jsonl")
    with segment.open("ab") as file:
        file.write(b"\xff\xfe{not json\n")
    journal.add(record("b"))
    again = UsageJournal(tmp_path)
    assert names(again) == ["a", "b"]
    assert again.unreadable == 1


async def test_acknowledged_records_are_forgotten_and_their_space_freed(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, segment_bytes=1500)
    every = [str(number) for number in range(40)]
    for name in every:
        journal.add(record(name))
    await journal.sync()
    assert len(list(tmp_path.glob("usage-*.jsonl"))) > 3
    journal.acknowledge(every)
    assert len(journal) == 0
    assert sum(path.stat().st_size for path in tmp_path.glob("usage-*.jsonl")) == 0
    await journal.close()
    assert list(tmp_path.glob("usage-*.jsonl")) == []


async def test_rotation_keeps_order_and_every_record(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, segment_bytes=1000)
    for number in range(25):
        journal.add(record(str(number)))
    await journal.close()
    assert names(UsageJournal(tmp_path)) == [str(number) for number in range(25)]


async def test_a_full_journal_drops_the_oldest_and_says_how_many(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, limit=3)
    for number in range(5):
        journal.add(record(str(number)))
    assert names(journal) == ["2", "3", "4"]
    assert journal.dropped == 2
    await journal.close()
    assert names(UsageJournal(tmp_path, limit=2)) == ["3", "4"]


async def test_the_same_attempt_is_kept_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = UsageJournal(tmp_path)
    journal.add(record("a"))
    journal.add(record("a"))
    assert len(journal) == 1
    assert "second usage record" in caplog.text


async def test_a_full_disk_keeps_records_in_memory_and_writes_them_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = UsageJournal(tmp_path)
    real_write = os.write

    def full(descriptor: int, data: bytes) -> int:
        return real_write(descriptor, data[: len(data) // 2])

    journal.add(record("a"))
    with monkeypatch.context() as patch:
        patch.setattr("dataplane.usage.os.write", full)
        journal.add(record("b"))
        assert journal.unwritten == 1
    assert names(journal) == ["a", "b"]
    await journal.sync()
    assert journal.unwritten == 0
    assert names(UsageJournal(tmp_path)) == ["a", "b"]


async def test_the_writer_task_retries_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.usage.RETRY_S", 0.01)
    journal = UsageJournal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("dataplane.usage.os.write", lambda descriptor, data: 0)
        journal.add(record("a"))
    task = asyncio.create_task(journal.run())
    async with asyncio.timeout(10):
        while journal.unwritten:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert names(UsageJournal(tmp_path)) == ["a"]


def test_an_unusable_folder_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        UsageJournal(tmp_path / "file")
