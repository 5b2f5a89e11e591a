"""A spool's files: torn, damaged, and on a disk that refuses."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from controlplane.ledger import segments as module
from controlplane.ledger.segments import frame
from controlplane.ledger.spool import READ_BYTES, Spool, SpoolError
from tests.controlplane.ledger.streaming import everything, payloads


async def test_cut_off_at_any_byte_every_whole_record_before_is_read_and_writing_goes_on(
    tmp_path: Path, rng: random.Random
) -> None:
    spool = Spool(tmp_path / "whole")
    written = payloads(rng, 6, largest=40)
    ends = []
    for one in written:
        await spool.append(one)
        ends.append(spool.held_bytes)
    await spool.close()
    (segment,) = (tmp_path / "whole").glob("usage-*.spool")
    data = segment.read_bytes()
    assert len(data) == ends[-1]
    for cut in range(len(data) + 1):
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        (folder / segment.name).write_bytes(data[:cut])
        torn = Spool(folder)
        whole = written[: sum(end <= cut for end in ends)]
        found, cursor = await everything(torn)
        assert found == whole, cut
        await torn.append(b"new")
        assert (await everything(torn, cursor))[0] == [b"new"]
        assert (await everything(torn))[0] == [*whole, b"new"], cut
        await torn.close()


async def test_a_damaged_stretch_costs_the_records_it_hits_and_no_other(tmp_path: Path, rng: random.Random) -> None:
    spool = Spool(tmp_path)
    written = payloads(rng, 40)
    for one in written:
        await spool.append(one)
    await spool.close()
    (segment,) = tmp_path.glob("usage-*.spool")
    for _ in range(60):
        data = bytearray(segment.read_bytes())
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        folder = tmp_path / f"damaged-{rng.random()}"
        folder.mkdir()
        (folder / segment.name).write_bytes(data)
        damaged = Spool(folder)
        found = (await everything(damaged, most=5))[0]
        assert len(found) == 39 and set(found) < set(written)
        assert damaged.skipped_bytes > 0
        await damaged.close()


async def test_a_long_stretch_that_is_no_record_does_not_stop_the_reader(tmp_path: Path, rng: random.Random) -> None:
    spool = Spool(tmp_path)
    await spool.append(b"before")
    await spool.close()
    (segment,) = tmp_path.glob("usage-*.spool")
    with segment.open("ab") as file:
        file.write(rng.randbytes(2 * READ_BYTES) + frame(b"after"))
    again = Spool(tmp_path)
    assert (await everything(again))[0] == [b"before", b"after"]
    await again.close()


async def test_a_disk_that_refuses_is_said_to_the_caller_and_not_built_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    await spool.append(b"good")
    real_write, real_sync = os.write, os.fdatasync

    def half(file: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(file, data[:5])

    monkeypatch.setattr(module.os, "write", half)
    with pytest.raises(SpoolError, match="No space left"):
        await spool.append(b"lost for lack of room, after some of it was written" + b"!" * 3)
    monkeypatch.setattr(module.os, "write", real_write)

    def failing(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "fdatasync", failing)
    with pytest.raises(SpoolError, match="Input/output"):
        await spool.append(b"lost to a failed fsync")
    monkeypatch.setattr(module.os, "fdatasync", real_sync)
    await spool.append(b"good again")
    assert (await everything(spool))[0] == [b"good", b"good again"]
    await spool.close()
    again = Spool(tmp_path)
    assert (await everything(again))[0] == [b"good", b"good again"]
    await again.close()


async def test_a_folder_that_cannot_be_made_durable_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    real = os.fsync

    def failing(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "fsync", failing)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(SpoolError, match="Input/output"):
            await spool.append(b"lost")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(tmp_path.glob("usage-*.spool")) == []
    monkeypatch.setattr(module.os, "fsync", real)
    await spool.append(b"kept")
    assert (await everything(spool))[0] == [b"kept"]
    await spool.close()
