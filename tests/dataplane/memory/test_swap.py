"""A request goes to host memory and comes back with the same KV."""

from __future__ import annotations

import pytest

from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from tests.dataplane.memory.helpers import append, start
from tests.factories.requests import make_request

PROMPT = list(range(10))


def test_a_request_comes_back_with_its_tokens_and_room_for_more() -> None:
    manager = KVManager(9, 4, host_blocks=8)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert manager.swap_out(request)
    assert manager.take_transfers().swap_out == ((1, 0), (2, 1), (3, 2))
    assert manager.is_swapped("0")
    assert (manager.swapped_tokens("0"), manager.table("0"), manager.free_blocks) == (10, [], 8)
    manager.check_integrity()

    start(manager, other := make_request("1", [9] * 32))
    assert manager.swap_in(request, 1) is None
    manager.free(other)
    request.tokens.append(50)
    table = manager.swap_in(request, 1)
    assert table is not None
    assert table == manager.table("0")
    assert len(table) == 3
    assert manager.take_transfers().swap_in == tuple(zip((0, 1, 2), table, strict=True))
    assert not manager.is_swapped("0")
    match = manager.match(make_request("2", PROMPT))
    assert (match.tokens, match.host_tokens) == (8, 0), "its full blocks are found on the device at once"
    assert (manager.swapped_out, manager.swapped_in) == (3, 3)
    assert manager.host.used == 0
    manager.check_integrity()
    request.computed = 11
    append(manager, request, 51)
    assert manager.match(make_request("2", [*PROMPT, 50, 51, 0])).tokens == 12


def test_what_the_device_still_has_is_not_copied_in() -> None:
    manager = KVManager(9, 4, host_blocks=8)
    request = make_request("0", PROMPT)
    start(manager, request)
    before = manager.table("0")
    assert manager.swap_out(request)
    manager.take_transfers()
    table = manager.swap_in(request, 0)
    assert table is not None
    assert table[:2] == before[:2], "full blocks were still cached"
    assert manager.take_transfers().swap_in == ((2, table[2]),), "only the last block had no name"
    assert manager.swapped_in == 1


def test_swapping_out_fails_whole_when_host_memory_has_no_room() -> None:
    manager = KVManager(9, 4, host_blocks=2)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert not manager.swap_out(request)
    assert manager.table("0") == [1, 2, 3]
    assert not manager.is_swapped("0")
    assert not manager.take_transfers()
    assert manager.host.used == 0
    manager.check_integrity()


def test_blocks_that_are_in_host_memory_already_take_room_there_as_well() -> None:
    manager = KVManager(9, 4, host_blocks=3)
    request, other = make_request("0", PROMPT), make_request("1", [9] * 3)
    start(manager, request)
    assert manager.swap_out(request)
    assert manager.swap_in(request, 0) is not None
    manager.take_transfers()
    start(manager, other)
    assert manager.swap_out(other)
    assert (manager.host.used, manager.host.cached) == (1, 2)
    manager.take_transfers()
    assert not manager.swap_out(request), "its two full blocks are there, and then there is no room for its last one"
    assert manager.host.used == 1
    manager.drop_swapped(other)
    assert manager.swap_out(request)
    assert len(manager.take_transfers().swap_out) == 1
    manager.check_integrity()


def test_without_host_memory_or_blocks_nobody_swaps() -> None:
    manager = KVManager(9, 4)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert not manager.swap_out(request)
    assert not manager.swap_out(make_request("1", PROMPT))
    with pytest.raises(IntegrityError, match="request 0 is not in host memory"):
        manager.swap_in(request, 1)


def test_cached_prefixes_make_way_for_swapped_requests_and_never_the_other_way() -> None:
    manager = KVManager(5, 4, host_blocks=3)
    old, young = make_request("old", [1] * 8), make_request("young", [2] * 16)
    start(manager, old)
    manager.free(old)
    start(manager, young)
    assert manager.host.cached == 2
    manager.take_transfers()
    manager.free(young)
    request = make_request("0", PROMPT)
    start(manager, request)
    manager.take_transfers()
    assert manager.swap_out(request)
    assert manager.host.used == 3
    assert manager.match(make_request("x", [1] * 9)).tokens == 0
    start(manager, make_request("y", [7] * 16))
    assert manager.host.used == 3
    moved = manager.take_transfers().swap_out
    assert len(moved) == 3, "what y evicts finds no room"
    assert manager.is_swapped("0")
    manager.check_integrity()


def test_requests_with_a_common_prefix_share_its_host_copy() -> None:
    manager = KVManager(12, 4, host_blocks=4)
    one, two = make_request("1", PROMPT), make_request("2", [*range(8), 90])
    start(manager, one)
    start(manager, two)
    assert manager.swap_out(one)
    assert manager.swap_out(two), "4 host blocks hold two full ones once and two tails"
    assert (manager.host.used, manager.swapped_out) == (4, 4)
    manager.check_integrity()
    assert len(manager.take_transfers().swap_out) == 4
    manager.drop_swapped(one)
    assert manager.host.used == 3
    assert manager.swap_in(two, 0) is not None
    manager.take_transfers()
    assert manager.host.used == 0
    manager.check_integrity()


def test_what_came_back_stays_findable_in_host_memory_as_a_prefix() -> None:
    manager = KVManager(5, 4, host_blocks=4)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert manager.swap_out(request)
    assert manager.swap_in(request, 0) is not None
    manager.take_transfers()
    manager.free(request)
    start(manager, make_request("1", [9] * 16))
    assert not manager.take_transfers().swap_out, "the prefix it evicts is there already"
    assert manager.match(make_request("2", PROMPT)).host_tokens == 8


def test_a_shared_block_stays_with_those_who_hold_it() -> None:
    manager = KVManager(12, 4, host_blocks=8)
    parent, child = make_request("0", PROMPT), make_request("1", PROMPT)
    start(manager, parent)
    manager.fork(parent, child)
    child.computed = 10
    assert manager.swap_out(parent)
    assert manager.table("1") == [1, 2, 3]
    append(manager, child, 60)
    assert manager.copied == 0, "nobody else writes to its last block any more"
    assert manager.swap_in(parent, 1) is not None
    assert manager.table("0")[2] != 3
    manager.check_integrity()


def test_without_prefix_caching_a_request_swaps_as_well() -> None:
    manager = KVManager(9, 4, prefix_caching=False, host_blocks=3)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert manager.swap_out(request)
    assert manager.host.cached == 0
    table = manager.swap_in(request, 0)
    assert table is not None
    moved = manager.take_transfers()
    assert moved.swap_out == ((1, 0), (2, 1), (3, 2))
    assert moved.swap_in == tuple(zip((0, 1, 2), table, strict=True))


def test_reserved_blocks_are_not_moved_and_are_taken_again() -> None:
    manager = KVManager(9, 4, host_blocks=3)
    request = make_request("0", PROMPT)
    assert manager.allocate(request, 10, reserve=24) is not None
    request.computed = 10
    assert manager.held("0") == 6
    assert manager.swap_out(request)
    assert len(manager.take_transfers().swap_out) == 3
    table = manager.swap_in(request, 1, reserve=24)
    assert table is not None
    assert len(table) == 6


def test_a_block_this_step_still_fills_is_not_swapped_out_in_it() -> None:
    manager = KVManager(9, 4, host_blocks=8)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert manager.swap_out(request)
    manager.take_transfers()
    assert manager.swap_in(request, 0) is not None
    assert not manager.swap_out(request)
    manager.take_transfers()
    assert manager.swap_out(request)


def test_freeing_a_swapped_request_frees_its_host_blocks() -> None:
    manager = KVManager(9, 4, host_blocks=8)
    for end in (manager.free, manager.drop_swapped):
        request = make_request("0", PROMPT)
        start(manager, request)
        assert manager.swap_out(request)
        end(request)
        assert not manager.is_swapped("0")
        assert manager.host.used == 0
        manager.check_integrity()


def test_reset_waits_for_swapped_requests() -> None:
    """What they would bring back was computed before the reset."""
    manager = KVManager(9, 4, host_blocks=8)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert manager.swap_out(request)
    manager.take_transfers()
    assert not manager.reset_prefix_cache()
    assert manager.match(make_request("1", PROMPT)).tokens == 8
    manager.drop_swapped(request)
    assert manager.reset_prefix_cache()
    manager.check_integrity()


def test_a_request_in_both_places_is_found() -> None:
    manager = KVManager(9, 4, host_blocks=8)
    request = make_request("0", PROMPT)
    start(manager, request)
    assert manager.swap_out(request)
    assert manager.allocate(request, 10) is not None
    with pytest.raises(IntegrityError, match="request 0 holds blocks and is swapped out"):
        manager.check_integrity()
