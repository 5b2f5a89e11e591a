"""Evicted prefixes go to host memory and come back from there; swapped requests come first."""

from __future__ import annotations

import pytest

from dataplane.errors import IntegrityError
from dataplane.memory.free_queue import NoFreeBlocksError
from dataplane.memory.host_pool import HostPool
from dataplane.memory.manager import KVManager
from dataplane.protocol import BlockRemoved, BlockStored
from tests.dataplane.memory.helpers import append, start
from tests.factories.requests import make_request


def filled(host_blocks: int, *, events: bool = False) -> KVManager:
    """Four usable blocks of four tokens; request a's two blocks were evicted by b's four, which is freed too."""
    manager = KVManager(5, 4, host_blocks=host_blocks, events=events)
    a, b = make_request("a", [1] * 8), make_request("b", [2] * 16)
    start(manager, a)
    manager.free(a)
    start(manager, b)
    manager.free(b)
    return manager


def test_an_evicted_prefix_is_found_in_host_memory() -> None:
    manager = filled(8)
    assert manager.offloaded == 2
    out = manager.take_transfers().swap_out
    # Tail first: a's second block is taken before its first one.
    assert out == ((2, 0), (1, 1))
    again = make_request("c", [1] * 9)
    match = manager.match(again)
    assert (len(match.device), [block.block_id for block in match.host]) == (0, [1, 0])
    assert (match.tokens, match.host_tokens) == (8, 8)
    taken = manager.allocate(again, 1, match)
    assert taken is not None
    again.computed = 9
    moved = manager.take_transfers()
    assert moved.swap_in == ((1, taken[0]), (0, taken[1]))
    assert manager.match(make_request("d", [1] * 9)).host_tokens == 0, "it is on the device again"
    manager.check_integrity()


def test_a_prefix_may_lie_in_both_tiers() -> None:
    manager = KVManager(5, 4, host_blocks=8)
    a = make_request("a", [1] * 12)
    start(manager, a)
    manager.free(a)
    b = make_request("b", [2] * 8)
    start(manager, b)
    match = manager.match(make_request("c", [1] * 13))
    assert ([block.block_id for block in match.device], match.host_tokens, match.tokens) == ([1, 2], 4, 12)


def test_a_prefix_that_is_in_host_memory_already_is_not_moved_again() -> None:
    manager = filled(8)
    manager.take_transfers()
    c = make_request("c", [1] * 9)
    start(manager, c)
    manager.free(c)
    manager.take_transfers()
    before = manager.offloaded
    start(manager, make_request("d", [3] * 16))
    moved = manager.take_transfers().swap_out
    assert len(moved) == manager.offloaded - before == 1, "b's last block on the device; a's blocks are there already"
    assert manager.match(make_request("e", [1] * 9)).host_tokens == 8


def test_host_memory_forgets_the_least_recently_used_prefix() -> None:
    manager = filled(4)
    manager.take_transfers()
    assert manager.match(make_request("x", [1] * 9)).host_tokens == 8
    c = make_request("c", [3] * 16)
    start(manager, c)
    # b's four blocks came after a's two: host memory holds b alone.
    assert manager.match(make_request("x", [1] * 9)).tokens == 0
    assert manager.match(make_request("x", [2] * 17)).host_tokens == 16
    assert manager.host.cached == 4


def test_a_hit_in_host_memory_is_not_evicted_by_what_makes_room_for_it() -> None:
    """Its device block is taken from a cached one, whose contents want a host block in the same step."""
    manager = filled(2)
    manager.take_transfers()
    c = make_request("c", [1] * 9)
    match = manager.match(c)
    assert [block.block_id for block in match.host] == [1, 0]
    assert manager.allocate(c, 1, match) is not None
    moved = manager.take_transfers()
    assert len(moved.swap_in) == 2
    assert not moved.swap_out, "both host blocks are still to be read"
    manager.check_integrity()


def test_a_host_block_that_this_step_still_reads_is_not_written_by_it() -> None:
    """Moves out come before moves in, so a later eviction must not be given a host block that a hit waits to read."""
    manager = filled(2)
    manager.take_transfers()
    c = make_request("c", [1] * 9)
    start(manager, c)
    start(manager, d := make_request("d", [3] * 4))
    moved = manager.take_transfers()
    assert sorted(host for host, _ in moved.swap_in) == [0, 1]
    assert not moved.swap_out, "d evicts a block of b's, and both host blocks are still to be read"
    manager.free(c)
    manager.free(d)
    start(manager, make_request("e", [4] * 16))
    assert len(manager.take_transfers().swap_out) == 1, "the step after may: d's block goes out"


def test_what_this_step_moves_in_is_not_moved_out_by_it() -> None:
    manager = filled(8)
    manager.take_transfers()
    c = make_request("c", [1] * 9)
    match = manager.match(c)
    assert manager.allocate(c, 0, match) is not None
    manager.free(c)
    manager.host.forget(c.block_hashes[:2])
    start(manager, make_request("d", [3] * 16))
    moved = manager.take_transfers()
    assert len(moved.swap_in) == 2
    assert sorted(device for device, _ in moved.swap_out) == [1, 2, 3, 4], "b's four; c's two are not there yet"


def test_events_tell_of_the_device_alone() -> None:
    manager = filled(8, events=True)
    c = make_request("c", [1] * 9)
    manager.take_events()
    start(manager, c)
    events = manager.take_events()
    stored = [event for event in events if isinstance(event, BlockStored)]
    removed = [event.block_hashes[0] for event in events if isinstance(event, BlockRemoved)]
    assert [event.block_hashes for event in stored] == [c.block_hashes[:2]]
    assert stored[0].token_ids == [1] * 8
    assert len(removed) == 3


def test_contents_that_another_device_block_has_too_are_not_moved() -> None:
    manager = KVManager(5, 4, host_blocks=8)
    held, twin = make_request("a", [1] * 4), make_request("b", [1] * 4, read_cache=False)
    start(manager, held)
    start(manager, twin)
    manager.free(twin)
    start(manager, make_request("c", [2] * 12))
    assert manager.pool.evictions == 1
    assert not manager.take_transfers()
    assert manager.host.cached == 0


def test_no_host_memory_moves_nothing() -> None:
    manager = filled(0)
    assert not manager.take_transfers()
    assert manager.match(make_request("x", [1] * 9)).tokens == 0


def test_reset_empties_both_tiers() -> None:
    manager = filled(8)
    manager.take_transfers()
    assert manager.reset_prefix_cache()
    assert manager.host.cached == 0
    assert manager.match(make_request("x", [1] * 9)).tokens == 0
    manager.check_integrity()


def test_contents_that_are_not_to_be_trusted_are_forgotten_in_host_memory_too() -> None:
    manager = filled(8)
    c = make_request("c", [1] * 9)
    start(manager, c)
    assert manager.host.cached == 5
    manager.distrust([c])
    manager.free(c)
    assert len(manager.take_scrub()) == 3
    assert manager.match(make_request("x", [1] * 9)).tokens == 0
    manager.check_integrity()


def test_recomputing_what_is_in_host_memory_is_not_needed_after_the_device_forgot_it() -> None:
    """The next turn of a conversation finds prompt and answer in whichever tier they lie."""
    manager = KVManager(5, 4, host_blocks=8)
    a = make_request("a", range(6))
    start(manager, a)
    append(manager, a, 70, 71, 72)
    manager.free(a)
    b = make_request("b", [2] * 16)
    start(manager, b)
    manager.free(b)
    assert manager.match(make_request("c", [*range(6), 70, 71, 72, 73])).host_tokens == 8


# ------------------------------------------------------------------------------------------------------------ the pool


def test_empty_host_blocks_are_taken_before_cached_ones() -> None:
    host = HostPool(3)
    assert host.admit(b"a", None) is host.blocks[0]
    (plain,) = host.take(1)
    assert plain.block_id == 1
    host.release([plain])
    assert host.admit(b"b", None) is plain
    assert host.admit(b"c", None) is host.blocks[2]
    assert host.admit(b"a", None) is None, "it is here"
    assert host.admit(b"d", None) is plain, "b was used longest ago, since a was asked for again"
    assert host.get(b"b") is None
    host.check_integrity()


def test_a_full_host_pool_admits_nothing_and_gives_nothing() -> None:
    host = HostPool(2)
    held = host.take(2)
    assert host.admit(b"a", None) is None
    with pytest.raises(NoFreeBlocksError, match="1 host blocks wanted, 0 free"):
        host.take(1)
    host.release(held)
    with pytest.raises(IntegrityError, match="released more often"):
        host.release(held)


def test_a_host_block_nobody_knows_is_found() -> None:
    host = HostPool(2)
    host.admit(b"a", None)
    host.blocks[0].key = b"b"
    with pytest.raises(IntegrityError, match="hash that the index does not know"):
        host.check_integrity()


def test_a_wrong_host_reference_count_is_found() -> None:
    manager = KVManager(5, 4, host_blocks=2)
    manager.host.take(1)
    with pytest.raises(IntegrityError, match="host block 0 counts 1 holders"):
        manager.check_integrity()
