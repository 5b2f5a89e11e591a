"""Alarms ring once, in order, on time, and not after they were dropped."""

from __future__ import annotations

import asyncio

from controlplane.alarms import Alarms


async def test_they_ring_in_order_and_never_early() -> None:
    loop, alarms, rung = asyncio.get_running_loop(), Alarms(0.02), list[tuple[int, float]]()
    done = asyncio.Event()
    began = loop.time()
    for number in range(3):
        alarms.set(lambda number=number: rung.append((number, loop.time())))
        await asyncio.sleep(0.005)
    alarms.set(done.set)
    await done.wait()
    assert [number for number, _ in rung] == [0, 1, 2]
    assert all(at - began >= 0.02 + 0.005 * number - 1e-3 for number, at in rung)
    assert not len(alarms)


async def test_a_dropped_one_is_silent_and_does_not_hold_up_those_behind_it() -> None:
    alarms, rung, done = Alarms(0.01), list[str](), asyncio.Event()
    first = alarms.set(lambda: rung.append("dropped"))
    alarms.set(done.set)
    alarms.drop(first)
    alarms.drop(first)
    await done.wait()
    assert rung == []


async def test_one_that_rings_may_set_another_and_the_loop_has_one_timer_for_all() -> None:
    alarms, rung, done = Alarms(0.01), list[int](), asyncio.Event()

    def again() -> None:
        rung.append(len(alarms))
        if len(rung) == 3:
            done.set()
        else:
            alarms.set(again)

    alarms.set(again)
    await done.wait()
    assert rung == [0, 0, 0]


async def test_an_alarm_that_is_set_after_all_have_rung_rings_too() -> None:
    alarms = Alarms(0.005)
    for _ in range(3):
        done = asyncio.Event()
        alarms.set(done.set)
        await done.wait()


async def test_one_that_sets_another_as_it_rings_delays_nobody_behind_it() -> None:
    loop, alarms, rung = asyncio.get_running_loop(), Alarms(0.2), list[float]()
    done = asyncio.Event()
    alarms.set(lambda: rung.append(alarms.set(lambda: None)))
    await asyncio.sleep(0.02)
    began = loop.time()

    def second() -> None:
        rung.append(loop.time() - began)
        done.set()

    alarms.set(second)
    await done.wait()
    assert rung[1] < 0.35  # 0.2 s, not nearly twice that


async def test_one_that_fails_silences_no_other() -> None:
    def fail() -> None:
        raise ValueError

    alarms, done = Alarms(0.01), asyncio.Event()
    alarms.set(fail)
    alarms.set(done.set)
    await done.wait()
