"""After a failure nobody waits again, but for one who tries."""

from __future__ import annotations

from controlplane.admission.circuit import FIRST_PAUSE_S, LONGEST_PAUSE_S, Circuit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_call_tries_after_each_pause_and_pauses_grow_to_a_bound() -> None:
    clock = Clock()
    circuit = Circuit(clock)
    assert all(circuit.allow() for _ in range(5))
    for _ in range(5):
        circuit.failed()
    pause = FIRST_PAUSE_S
    for _ in range(8):
        assert not circuit.allow()
        clock.now += pause
        assert [circuit.allow() for _ in range(4)] == [True, False, False, False]
        circuit.failed()
        pause = min(pause * 2, LONGEST_PAUSE_S)
    assert pause == LONGEST_PAUSE_S
    clock.now += pause
    assert circuit.allow()
    assert circuit.succeeded() is True
    assert circuit.succeeded() is False
    assert all(circuit.allow() for _ in range(5))


def test_a_cancelled_try_lets_the_next_one_try() -> None:
    clock = Clock()
    circuit = Circuit(clock)
    circuit.failed()
    clock.now += FIRST_PAUSE_S
    assert circuit.allow()
    circuit.abandoned()
    assert circuit.is_open
    assert circuit.allow()
