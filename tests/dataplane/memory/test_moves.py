"""The moves of one step, whatever the order in which they were asked for."""

from __future__ import annotations

from dataplane.memory.block_pool import BlockPool
from dataplane.memory.events import EventLog
from dataplane.memory.host_pool import HostPool
from dataplane.memory.moves import MoveLog
from dataplane.scheduling.plan import Transfers


def log() -> tuple[MoveLog, BlockPool, HostPool]:
    device, host = BlockPool(9, EventLog(enabled=False, block_size=4)), HostPool(4)
    return MoveLog(device, host), device, host


def test_a_copy_of_a_copy_reads_the_first_source() -> None:
    """So that no copy reads what another one writes."""
    moves, device, _ = log()
    first, second, third = device.take(3)
    device.touch([first, second])
    moves.copy(first, second)
    moves.copy(second, third)
    assert moves.take().copies == ((1, 2), (1, 3))
    device.check_integrity()


def test_a_block_given_back_and_brought_in_is_not_copied_to_as_well() -> None:
    """Copies come after moves in: the stale one would win."""
    moves, device, host = log()
    source, target = device.take(2)
    device.touch([source])
    moves.copy(source, target)
    moves.bring(host.take(1), [target])
    assert moves.take() == Transfers(swap_in=((0, 2),))


def test_a_host_block_used_twice_receives_the_later_contents() -> None:
    moves, device, host = log()
    one, two = device.take(2)
    (target,) = host.take(1)
    moves.out(one, target)
    moves.out(two, target)
    assert moves.take().swap_out == ((2, 0),)


def test_what_a_step_reads_is_held_until_it_is_taken() -> None:
    moves, device, host = log()
    source, target = device.take(2)
    stored = host.take(2)
    moves.copy(source, target)
    moves.bring(stored, device.take(2))
    host.release(stored)
    assert (source.refs, host.used) == (1, 2)
    assert moves.take()
    assert (source.refs, host.used) == (0, 0)
    assert not moves.take()
