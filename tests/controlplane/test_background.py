"""Background work that fails begins again, and ends when it is told to."""

from __future__ import annotations

import asyncio
import logging

import pytest

from controlplane import background
from controlplane.background import kept
from controlplane.settings import Settings
from tests.controlplane.gateway.test_dispatch import doors, drained, in_line, roomy, small

__all__ = ["roomy", "small"]


async def test_what_fails_is_logged_and_begins_again_until_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.001)
    begun, works = 0, asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError("odd")
        works.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(kept("clock", work))
    with caplog.at_level(logging.ERROR, "tidegate.background"):
        await works.wait()
    assert [record.getMessage() for record in caplog.records] == ["background work 'clock' failed and begins again"] * 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun == 3


async def test_what_is_done_is_not_begun_again() -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1

    await kept("once", work)
    assert begun == 1


async def test_f14_a_line_whose_turns_failed_once_lets_go_those_who_wait(
    small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody's patience is at its end."""
    monkeypatch.setattr(background, "AGAIN_S", 0.01)
    async with doors(small) as (served, room, _):
        tasks = await in_line(served, room, [("waits", {})])
        queue, failed = served.gateway.dispatch.line("m").queue, asyncio.Event()
        taken = queue._take_turn

        async def fail_once() -> None:
            monkeypatch.setattr(queue, "_take_turn", taken)
            failed.set()
            raise ValueError("an answer that nobody foresaw")

        monkeypatch.setattr(queue, "_take_turn", fail_once)
        queue.wake()
        await failed.wait()
        async with asyncio.timeout(10):
            assert await drained(room, tasks) == ["first", "waits"]
