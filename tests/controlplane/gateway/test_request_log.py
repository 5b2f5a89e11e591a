"""requests.jsonl: complete, bounded, and harmless when the disk fails."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controlplane.gateway import request_log as module
from controlplane.gateway.record import Outcome, RequestRecord
from controlplane.gateway.request_log import RequestLog
from controlplane.tenants.schemas import KeyGrant

GRANT = KeyGrant(
    key_id="key-1",
    secret_hash=b"never-in-the-log",
    tenant_id="t",
    tenant="acme",
    cache_salt="never-in-the-log-either",
    allowed_models=None,
    revoked=False,
    tenant_active=True,
)


def record(number: int = 0, outcome: Outcome = Outcome.FINISHED, reason: str = "stop") -> RequestRecord:
    made = RequestRecord(request_id=f"r{number}", grant=GRANT, at=12.5, accepted=0.0, ttft_s=0.25, e2e_s=1.5)
    made.conclude(outcome, reason, 200 if outcome is Outcome.FINISHED else 503)
    return made


async def test_lines_carry_the_records_numbers_and_no_secret(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    log.write(record(1))
    log.write(record(2, Outcome.FAILED, "upstream_reset"))
    await log.flush()
    text = (tmp_path / "requests.jsonl").read_text()
    finished, failed = [json.loads(line) for line in text.splitlines()]
    assert set(finished) == {
        *("ts", "request_id", "attempt_id", "tenant", "key_id", "model", "pool", "replica", "stream", "status"),
        *("outcome", "finish", "error_code", "ttft_s", "ttft_visible_s", "tpot_s", "e2e_s"),
        *("prompt_tokens", "cached_tokens", "output_tokens"),
    }
    assert (finished["ts"], finished["ttft_s"], finished["tpot_s"], finished["e2e_s"]) == (12.5, 0.25, None, 1.5)
    assert (finished["finish"], finished["error_code"]) == ("stop", None)
    assert (failed["finish"], failed["error_code"], failed["status"]) == (None, "upstream_reset", 503)
    assert "never-in-the-log" not in text


async def test_a_flood_without_usable_keys_is_rationed_and_costs_tenants_no_line(tmp_path: Path) -> None:
    dropped: list[int] = []
    now = 100.0
    log = RequestLog(tmp_path / "requests.jsonl", on_dropped=dropped.append, clock=lambda: now)

    def flood(requests: int) -> None:
        for number in range(requests):
            made = RequestRecord(request_id=f"s{number}", grant=None, at=12.5, accepted=0.0)
            made.conclude(Outcome.REFUSED, "invalid_api_key", 401)
            log.write(made)

    flood(1000)
    log.write(record(1))
    now += 3.0
    flood(1000)
    await log.flush()
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["request_id"] for line in lines if line["tenant"]] == ["r1"]
    assert sum(not line["tenant"] for line in lines) == module.STRANGERS_BURST + 3
    assert sum(dropped) == 2000 - module.STRANGERS_BURST - 3


async def test_files_are_rotated_by_size_and_their_number_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2000)
    log = RequestLog(tmp_path / "requests.jsonl")
    for number in range(100):
        log.write(record(number))
        await log.flush()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["requests.jsonl", "requests.jsonl.1", "requests.jsonl.2", "requests.jsonl.3"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    order = ["requests.jsonl.3", "requests.jsonl.2", "requests.jsonl.1", "requests.jsonl"]
    numbers = [
        int(json.loads(line)["request_id"][1:]) for name in order for line in (tmp_path / name).read_text().splitlines()
    ]
    assert numbers == list(range(numbers[0], 100))  # the newest, in order, without a gap


async def test_a_flush_that_is_cancelled_before_its_thread_begins_loses_no_line(tmp_path: Path) -> None:
    """As at a shutdown on a busy machine: the background flush is cancelled, then the last one runs."""
    loop, may_go_on = asyncio.get_running_loop(), threading.Event()
    pool = ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    pool.submit(may_go_on.wait)
    log = RequestLog(tmp_path / "requests.jsonl")
    log.write(record(1))
    background = asyncio.create_task(log.run())
    await asyncio.sleep(0.05)
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)
    may_go_on.set()
    await log.flush()
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 1


async def test_the_queue_is_bounded_and_what_is_dropped_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    dropped: list[int] = []
    log = RequestLog(tmp_path / "requests.jsonl", on_dropped=dropped.append)
    for number in range(25):
        log.write(record(number))
    await log.flush()
    assert sum(dropped) == 15
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 10


async def test_a_disk_that_fails_costs_lines_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    dropped: list[int] = []
    log = RequestLog(blocked / "requests.jsonl", on_dropped=dropped.append)
    for number in range(3):
        log.write(record(number))
        await log.flush()
    assert sum(dropped) == 3
    assert caplog.text.count("cannot be written") == 1


async def test_lines_are_written_without_being_asked_for(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    running = asyncio.create_task(log.run())
    for number in range(5):
        log.write(record(number))
    async with asyncio.timeout(5):
        while not (tmp_path / "requests.jsonl").exists():
            await asyncio.sleep(0.01)
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 5
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
