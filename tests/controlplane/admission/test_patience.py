"""Waiting as long as was said, less what the waiting process itself was late."""

from __future__ import annotations

import asyncio
import time

import pytest

from controlplane.admission.patience import SLICES, Patience, slices_of


async def test_silence_ends_in_a_timeout_and_leaves_the_task_as_it_was() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Patience(slices_of(0.05)):
            await asyncio.Event().wait()
    assert time.monotonic() - begun >= 0.045
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_an_answer_in_time_is_an_answer() -> None:
    async with Patience(slices_of(5.0)):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)


async def test_a_process_that_was_busy_itself_still_hears_an_answer_that_was_there() -> None:
    """With a plain timeout of the same length the answer comes too late."""

    async def heard(patience: object) -> bool:
        answered = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, answered.set_result, None)
        try:
            async with patience:  # type: ignore[attr-defined]
                asyncio.get_running_loop().call_soon(time.sleep, 0.2)
                await answered
                await asyncio.sleep(0)  # an answer takes more than one turn to be read
        except TimeoutError:
            return False
        return True

    assert await heard(Patience(slices_of(0.05)))
    assert not await heard(asyncio.timeout(0.05))


async def test_being_busy_again_and_again_ends_it_all_the_same() -> None:
    loop, turns, over = asyncio.get_running_loop(), 0, False

    def busy() -> None:
        nonlocal turns
        turns += 1
        time.sleep(0.01)
        if not over:
            loop.call_soon(busy)

    loop.call_soon(busy)
    with pytest.raises(TimeoutError):
        async with Patience(slices_of(0.01)):
            await asyncio.Event().wait()
    over = True
    assert SLICES <= turns <= 3 * SLICES


async def test_who_is_cancelled_is_cancelled_and_not_timed_out() -> None:
    async def wait() -> None:
        async with Patience(slices_of(10.0)):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
