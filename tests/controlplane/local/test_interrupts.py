"""Signals raise where they are expected and are kept elsewhere; those at once are one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from controlplane.local.interrupts import TOGETHER_S, Interrupts

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def interrupts(clock: Clock) -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    yield Interrupts(clock)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_request_raises_where_it_is_expected(interrupts: Interrupts, number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        signal.raise_signal(number)
    signal.raise_signal(number)


def test_one_that_comes_between_two_stretches_waits_for_the_next(interrupts: Interrupts, clock: Clock) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        signal.raise_signal(signal.SIGTERM)
    clock.now += 2 * TOGETHER_S
    signal.raise_signal(signal.SIGTERM)
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        done.append("began")
    assert done == []
    with interrupts.raised():
        done.append("went on")
    assert done == ["went on"]


def test_signals_at_once_are_one_request(interrupts: Interrupts, clock: Clock) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        signal.raise_signal(signal.SIGTERM)
    clock.now += TOGETHER_S * 0.9
    with interrupts.raised():
        signal.raise_signal(signal.SIGINT)
        clock.now += TOGETHER_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_who_asked_to_outlive_the_terminal_does(interrupts: Interrupts) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts().raised():
        signal.raise_signal(signal.SIGHUP)
