"""What the manager promises beyond the reference cases: eviction order, trust, events, waste, integrity."""

from __future__ import annotations

import pytest

from dataplane.errors import IntegrityError
from dataplane.memory.events import MAX_PENDING
from dataplane.memory.manager import KVManager
from dataplane.memory.prefix_cache import root_hash
from dataplane.protocol import AllBlocksCleared, BlockRemoved
from tests.dataplane.memory.helpers import COMMON, append, start
from tests.factories.requests import make_request


def test_formats_of_kv_do_not_share() -> None:
    assert root_hash(kv_format="float32", adapter="", salt="", tenant="") != root_hash(
        kv_format="int8", adapter="", salt="", tenant=""
    )


def test_a_second_copy_is_neither_stored_nor_removed_for_an_indexer() -> None:
    """Content is there as long as one block holds it."""
    manager = KVManager(11, 16, events=True)
    one, two = make_request("0", COMMON), make_request("1", COMMON)
    manager.allocate(one, 48)
    manager.allocate(two, 48)
    assert len(manager.take_events()) == 1
    manager.free(one)
    more = make_request("2", [7] * 15, read_cache=False)
    manager.allocate(more, 7 * 16 - 1, reserve=7 * 16)
    assert manager.pool.evictions == 3
    assert removed(manager) == 0
    assert len(manager.match(make_request("3", [*COMMON, 5])).device) == 3
    manager.free(two)
    manager.allocate(make_request("4", [8] * 15), 3 * 16)
    assert removed(manager) == 3
    manager.check_integrity()


def removed(manager: KVManager) -> int:
    """How many removals an indexer is told of."""
    return sum(isinstance(event, BlockRemoved) for event in manager.take_events())


def test_events_that_nobody_takes_collapse_to_cleared() -> None:
    manager = KVManager(4, 1, events=True)
    log = manager.pool.events
    for index in range(MAX_PENDING + 5):
        log.removed(index.to_bytes(4, "little"))
    taken = manager.take_events()
    assert taken[0] == AllBlocksCleared()
    assert len(taken) == 6


def test_a_full_hit_is_cut_so_that_one_token_is_computed() -> None:
    manager = KVManager(11, 16)
    start(manager, make_request("0", COMMON))
    assert len(manager.match(make_request("1", COMMON)).device) == 2
    assert len(manager.match(make_request("2", [*COMMON, 7])).device) == 3


def test_least_recently_freed_is_evicted_first() -> None:
    manager = KVManager(5, 4)
    old, young = make_request("0", [1] * 8), make_request("1", [2] * 8)
    start(manager, old)
    start(manager, young)
    manager.free(old)
    manager.free(young)
    start(manager, make_request("2", [3] * 8))
    assert manager.match(make_request("3", [1] * 9)).tokens == 0
    assert len(manager.match(make_request("4", [2] * 9)).device) == 2


def test_a_double_release_is_an_integrity_error() -> None:
    manager = KVManager(5, 4)
    request = make_request("0", range(4))
    start(manager, request)
    blocks = [manager.pool.blocks[block_id] for block_id in manager.table("0")]
    manager.free(request)
    with pytest.raises(IntegrityError, match="released more often"):
        manager.pool.release(blocks)


def test_a_wrong_reference_count_is_found() -> None:
    manager = KVManager(5, 4)
    start(manager, make_request("0", range(4)))
    manager.pool.blocks[1].refs = 2
    with pytest.raises(IntegrityError, match="block 1 counts 2 holders"):
        manager.check_integrity()


def test_reserved_blocks_are_held_from_the_start_and_not_asked_for_again() -> None:
    manager = KVManager(11, 16)
    request = make_request("0", COMMON + [3] * 7)
    assert manager.allocate(request, request.wanted, reserve=120) == [1, 2, 3, 4, 5, 6, 7, 8]
    request.computed = request.wanted
    assert manager.allocate(request, 0, reserve=120) == []
    assert append(manager, request, *[5] * 20) == []
    assert manager.allocate(make_request("1", range(8)), 8, reserve=33) is None
    assert manager.allocate(make_request("2", range(8)), 8, reserve=32) == [9, 10]


def test_many_are_extended_at_once_up_to_the_first_that_needs_more_than_a_count() -> None:
    manager = KVManager(11, 4)
    requests = [make_request(name, range(length)) for name, length in (("a", 5), ("b", 6), ("c", 7), ("d", 5))]
    for request in requests:
        manager.allocate(request, request.wanted - 1)
        request.computed = request.wanted - 1
        append(manager, request, 9)
        request.tokens.append(9)
    # Until the second block of "c" is full; its hash is to be made.
    assert manager.extend(requests, 0, 4) == 2
    assert manager.extend(requests, 2, 4) == 0
    assert manager.extend(requests, 3, 4) == 1
    assert manager.extend(requests, 0, 1) == 1
    assert [manager.useful_share, manager.held("c")] == [(6 + 7 + 7 + 6) / 32, 2]
    manager.free(requests[0])
    assert manager.extend(requests, 0, 4) == 0
    manager.check_integrity()


def test_an_admission_leaves_blocks_free_for_those_who_run() -> None:
    manager = KVManager(11, 16)
    assert manager.allocate(make_request("0", COMMON), 48, keep_free=8) is None
    assert manager.allocate(make_request("0", COMMON), 48, keep_free=7) == [1, 2, 3]


def test_useful_share_counts_a_shared_block_once_and_reserved_ones_as_empty() -> None:
    manager = KVManager(21, 16)
    assert manager.useful_share is None
    paged = make_request("0", COMMON + [3] * 7)
    start(manager, paged)
    assert manager.useful_share == pytest.approx(55 / 64)
    start(manager, make_request("1", COMMON + [4] * 1))
    assert manager.useful_share == pytest.approx(56 / 80)
    assert manager.empty_slots == 24
    manager.fork(paged, make_request("2", paged.tokens))
    assert manager.empty_slots == 24
    reserved = make_request("3", [9] * 16)
    manager.allocate(reserved, 16, reserve=64)
    assert manager.useful_share == pytest.approx(72 / 144)


def test_tokens_not_known_yet_name_no_block() -> None:
    """With two steps in flight the last tokens are placeholders: their block is named once they are in."""
    manager = KVManager(11, 4)
    request = make_request("0", range(3))
    start(manager, request)
    request.placeholders = 1
    assert manager.allocate(request, 1) == []
    request.computed = 4
    assert len(manager.pool.index) == 0
    request.tokens.append(7)
    request.placeholders = 1
    assert manager.allocate(request, 1) == [2]
    assert len(manager.pool.index) == 1
    assert manager.match(make_request("1", [0, 1, 2, 7, 9])).tokens == 4


def test_what_is_loaded_into_reserved_blocks_is_not_found_before_it_counts_as_computed() -> None:
    manager = KVManager(11, 4)
    request = make_request("0", range(9))
    assert manager.allocate(request, 0, reserve=8) == [1, 2]
    assert manager.match(make_request("1", range(9))).tokens == 0
    request.computed = 8
    assert manager.allocate(request, 1) == [3]
    assert manager.match(make_request("1", range(9))).tokens == 8
    manager.check_integrity()
