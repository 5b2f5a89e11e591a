"""What is begun and not waited for: each kind once at a time, and over when it must be."""

from __future__ import annotations

import asyncio

from controlplane.admission.errands import Errands


async def test_a_kind_under_way_is_not_begun_again_until_it_is_over() -> None:
    errands, go_on, begun = Errands(), asyncio.Event(), list[str]()

    async def work() -> None:
        begun.append("work")
        await go_on.wait()

    for _ in range(3):
        errands.start("work", work)
    await asyncio.sleep(0)
    assert (begun, len(errands)) == (["work"], 1)
    go_on.set()
    await errands.close(5.0)
    assert len(errands) == 0
    errands.start("work", work)
    await errands.close(5.0)
    assert begun == ["work", "work"]


async def test_closing_waits_for_what_ends_and_ends_what_does_not() -> None:
    errands, ended = Errands(), list[str]()

    async def soon() -> None:
        await asyncio.sleep(0.01)
        ended.append("by itself")

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    errands.start("soon", soon)
    errands.start("never", never)
    async with asyncio.timeout(5):
        await errands.close(0.1)
    assert ended == ["by itself", "cancelled"]
