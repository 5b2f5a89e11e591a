"""The spool: what was acknowledged is there after any crash, in order, and nothing is handed out torn."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.ledger import spool as module
from controlplane.ledger.segments import SpoolBusyError
from controlplane.ledger.spool import (
    BEGINNING,
    MAX_RECORD,
    Spool,
    SpoolError,
    SpoolFullError,
)
from tests.controlplane.ledger.streaming import everything, payloads

CHECKOUT = Path(__file__).parents[3]


async def test_many_appends_share_few_fsyncs_and_come_back_in_order(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(module.os, "fdatasync", lambda file: (synced.append(file), real(file)))
    spool = Spool(tmp_path, segment_bytes=20_000)
    written = payloads(rng, 500)
    await asyncio.gather(*(spool.append(one) for one in written))
    assert 1 <= len(synced) < 25
    assert len(list(tmp_path.glob("usage-*.spool"))) > 1
    for most in (1, 7, 1000):
        assert (await everything(spool, most=most))[0] == written
    await spool.close()
    again = Spool(tmp_path)
    assert (await everything(again))[0] == written
    await again.close()


async def test_an_acknowledgement_comes_after_the_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real = os.fdatasync
    monkeypatch.setattr(module.os, "fdatasync", lambda file: (real(file), events.append("durable")))
    spool = Spool(tmp_path)
    await spool.append(b"one")
    events.append("acknowledged")
    assert events == ["durable", "acknowledged"]
    await spool.close()


async def test_space_comes_back_when_everything_before_is_stored(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=4096)
    for n in range(100):
        await spool.append(n.to_bytes(2, "big") * 200)
    batch = await spool.read(BEGINNING, 50)
    files = len(list(tmp_path.glob("usage-*.spool")))
    spool.trim(batch.cursor)
    assert 0 < len(list(tmp_path.glob("usage-*.spool"))) < files
    rest, cursor = await everything(spool, batch.cursor)
    assert len(rest) == 50
    spool.trim(cursor)
    assert list(tmp_path.glob("usage-*.spool")) == [] and spool.held_bytes == 0
    await spool.append(b"next")
    assert (await everything(spool, cursor))[0] == [b"next"]
    await spool.close()
    again = Spool(tmp_path)
    assert (await everything(again))[0] == [b"next"], "what is not known to be stored comes again"
    await again.close((await everything(again))[1])
    assert list(tmp_path.glob("usage-*.spool")) == []


async def test_a_full_spool_refuses_and_drops_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=10_000, segment_bytes=2_000)
    kept = 0
    assert spool.accepting
    with pytest.raises(SpoolFullError):
        while True:
            await spool.append(bytes(90))
            kept += 1
            if spool.held_bytes > 9_000:
                assert not spool.accepting, "new work is refused before what runs cannot be written down"
    assert kept == 100
    results = await asyncio.gather(*(spool.append(b"x") for _ in range(5)), return_exceptions=True)
    assert all(isinstance(one, SpoolFullError) for one in results)
    found, cursor = await everything(spool)
    assert len(found) == 100
    spool.trim(cursor)
    await spool.append(b"room again")
    with pytest.raises(SpoolError, match="at most"):
        await spool.append(bytes(MAX_RECORD + 1))
    await spool.close()


async def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(SpoolBusyError):
        Spool(tmp_path)
    await spool.close()
    await Spool(tmp_path).close()


async def test_a_reader_waits_for_more_and_is_woken(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    waiting = asyncio.create_task(spool.beyond(BEGINNING))
    await asyncio.wait({waiting}, timeout=0.05)
    assert not waiting.done()
    await spool.append(b"one")
    await asyncio.wait_for(waiting, 10)
    _, cursor = await everything(spool)
    waiting = asyncio.create_task(spool.beyond(cursor))
    await asyncio.wait({waiting}, timeout=0.05)
    assert not waiting.done()
    await spool.append(b"two")
    await asyncio.wait_for(waiting, 10)
    await spool.close()


async def test_who_gives_up_waiting_disturbs_nobody(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    impatient = [asyncio.create_task(spool.append(b"impatient")) for _ in range(20)]
    patient = asyncio.create_task(spool.append(b"patient"))
    await asyncio.sleep(0)
    for task in impatient[::2]:
        task.cancel()
    await asyncio.gather(*impatient, patient, return_exceptions=True)
    assert (await everything(spool))[0].count(b"patient") == 1
    await spool.close()


WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from controlplane.ledger.spool import Spool

async def one(spool, name):
    await spool.append(name.encode() * 20)
    print(name, flush=True)

async def main():
    spool = Spool(Path(sys.argv[1]), segment_bytes=8192)
    for n in itertools.count():
        await asyncio.gather(*(one(spool, f"{sys.argv[2]}-{n}-{k};") for k in range(7)))

asyncio.run(main())
"""


async def test_f15_kill_9_at_random_moments_loses_nothing_that_was_acknowledged(
    tmp_path: Path, rng: random.Random
) -> None:
    folder = tmp_path / "spool"
    acknowledged: list[bytes] = []
    for life in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(life)],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        acknowledged += [process.stdout.readline().strip() for _ in range(rng.randint(1, 300))]
        process.send_signal(signal.SIGKILL)
        acknowledged += [line for line in process.communicate()[0].split(b"\n")[:-1] if line]
    spool = Spool(folder)
    found = [payload[: payload.index(b";") + 1] for payload in (await everything(spool))[0]]
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))
    await spool.close()


# --------------------------------------------------------------------------------------------------------------
# Records that nobody awaits
# --------------------------------------------------------------------------------------------------------------


async def settled(spool: Spool) -> None:
    while spool._flushing is not None:
        await asyncio.sleep(0.01)


async def test_what_is_put_waits_for_company_and_is_durable_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(module.os, "fdatasync", lambda file: (synced.append(file), real(file)))
    spool = Spool(tmp_path)
    written = payloads(rng, 300)
    for n, one in enumerate(written):
        spool.put(one)
        if n % 50 == 0:
            await asyncio.sleep(0.001)
    assert spool.bytes_after(BEGINNING) == spool.held_bytes > 0
    await settled(spool)
    assert 1 <= len(synced) < 30
    assert (await everything(spool))[0] == written
    await spool.close()


async def test_who_awaits_a_record_does_not_linger(tmp_path: Path) -> None:
    spool = Spool(tmp_path, linger_s=3600.0)
    spool.put(b"first")
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await spool.append(b"second")
    assert (await everything(spool))[0] == [b"first", b"second"]
    spool.put(b"third")
    async with asyncio.timeout(10):
        await spool.close()
    again = Spool(tmp_path)
    assert (await everything(again))[0] == [b"first", b"second", b"third"]
    await again.close()


async def test_a_disk_that_refuses_is_tried_again_and_nothing_is_lost_but_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    real, broken = os.fdatasync, True
    refused = 0

    def sync(file: int) -> None:
        nonlocal refused
        if broken:
            refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    monkeypatch.setattr(module.os, "fdatasync", sync)
    spool = Spool(tmp_path, linger_s=0.001)
    spool.put(b"one")
    while refused < 6:
        await asyncio.sleep(0.01)
    assert len(list(tmp_path.glob("usage-*.spool"))) <= 1, "a try that failed leaves no file behind"
    spool.put(b"two")
    broken = False
    await settled(spool)
    assert (await everything(spool))[0] == [b"one", b"two"]
    assert spool.lost == 0
    broken = True
    spool.put(b"three")
    async with asyncio.timeout(10):
        await spool.close()
    assert spool.lost == 1


async def test_the_age_of_what_waits_is_known_also_after_a_restart(tmp_path: Path) -> None:
    now = 1000.0
    spool = Spool(tmp_path, wall=lambda: now)
    assert spool.oldest_at is None
    await spool.append(b"old")
    first = (await spool.read(BEGINNING, 1)).cursor
    now = 1060.0
    await spool.append(b"young")
    assert spool.oldest_at == 1000.0
    spool.trim(first)
    assert spool.oldest_at == 1060.0
    assert spool.bytes_after(first) == spool.bytes_after(BEGINNING) - first.offset
    spool.trim(spool._end())
    assert (spool.oldest_at, spool.bytes_after(spool._end())) == (None, 0)
    await spool.append(b"left")
    await spool.close()
    again = Spool(tmp_path)
    assert again.oldest_at is not None
    await again.close()
