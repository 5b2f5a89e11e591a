"""Blocks change hands as in vLLM's own tests: cases K1 to K12 and K15 of DOMAIN 2.3, named by label.

K8 (multi-modal input), K13 (a draft model's last block) and K14 (groups of which one has a sliding window) have no
subject here yet: a model has one group of layers, and each of its tokens attends to all before it.
"""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.memory.free_queue import Block, FreeQueue, NoFreeBlocksError
from dataplane.memory.hit_window import HitWindow
from dataplane.memory.manager import KVManager
from dataplane.memory.prefix_cache import block_hash, root_hash
from dataplane.protocol import AllBlocksCleared, BlockRemoved, BlockStored
from tests.dataplane.memory.helpers import COMMON, free_order, key, start
from tests.factories.requests import make_request


def test_k1_pop_remove_append_and_exhaustion() -> None:
    blocks = [Block(index) for index in range(5)]
    queue = FreeQueue(blocks)
    assert queue.popleft().block_id == 0
    queue.remove(blocks[2])
    assert blocks[1].behind is blocks[3]
    assert blocks[3].before is blocks[1]
    queue.append(blocks[2])
    assert [block.block_id for block in queue] == [1, 3, 4, 2]
    queue.check_integrity()
    assert [queue.popleft().block_id for _ in range(4)] == [1, 3, 4, 2]
    assert len(queue) == 0
    with pytest.raises(NoFreeBlocksError, match="No free blocks available"):
        queue.popleft()


def test_k2_prefill_shares_full_blocks_and_frees_tail_first() -> None:
    manager = KVManager(11, 16)
    first = make_request("0", COMMON + [3] * 7)
    assert start(manager, first) == ([], [1, 2, 3, 4])
    parent = root_hash(kv_format="", adapter="", salt="", tenant="")
    for index, block_id in enumerate((1, 2, 3)):
        parent = block_hash(parent, [index] * 16)
        assert key(manager, block_id) == parent
    assert key(manager, 4) is None

    second = make_request("1", COMMON + [3] * 5)
    assert start(manager, second) == ([1, 2, 3], [5])
    assert [manager.pool.blocks[block_id].refs for block_id in (1, 2, 3)] == [2, 2, 2]
    assert manager.free_blocks == 5

    manager.free(first)
    manager.free(second)
    assert free_order(manager) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]

    third = make_request("2", COMMON + [3] * 6)
    assert start(manager, third) == ([1, 2, 3], [6])
    assert manager.free_blocks == 6
    manager.free(third)

    fourth = make_request("3", [99] * 160)
    assert start(manager, fourth) == ([], [7, 8, 9, 10, 4, 5, 6, 3, 2, 1])
    assert manager.free_blocks == 0


def test_k3_decode_takes_a_block_only_when_the_last_is_full() -> None:
    manager = KVManager(11, 16)
    request = make_request("0", COMMON + [3] * 7)
    start(manager, request)
    request.tokens += [8] * 4
    assert manager.allocate(request, 4) == []
    request.computed = 59
    assert key(manager, 4) is None
    request.tokens += [7] * 19
    assert manager.allocate(request, 19) == [5]
    assert key(manager, 4) is not None
    assert key(manager, 5) is None


def test_k4_documented_example_of_eviction_order() -> None:
    """vLLM's docs number ten blocks from 0; here the null block is 0, so every id is one higher."""
    manager = KVManager(11, 4)
    shared = list(range(12))
    zero = make_request("0", [*shared, 100, 101, 102])
    assert start(manager, zero)[1] == [1, 2, 3, 4]
    zero.tokens += [103, 104]
    assert manager.allocate(zero, 2) == [5]
    zero.computed = 17
    one = make_request("1", [*shared[:10], 200, 201, 202, 203])
    assert start(manager, one) == ([1, 2], [6, 7])
    manager.free(zero)
    assert free_order(manager)[-3:] == [5, 4, 3]
    manager.free(one)
    assert free_order(manager) == [8, 9, 10, 5, 4, 3, 7, 6, 2, 1]
    two = make_request("2", [*shared, *range(300, 317)])
    assert start(manager, two) == ([1, 2, 3], [8, 9, 10, 5, 4])


def test_k5_hits_are_touched_before_blocks_are_taken() -> None:
    manager = KVManager(3, 16)
    request = make_request("0", [0] * 16 + [1] * 16)
    assert start(manager, request)[1] == [1, 2]
    manager.free(request)
    assert free_order(manager) == [2, 1]
    again = make_request("1", [0] * 16 + [2] * 16)
    assert start(manager, again) == ([1], [2])
    assert manager.pool.evictions == 1


def test_k5_a_hit_at_the_head_of_the_free_queue_is_not_taken_for_something_new() -> None:
    manager = KVManager(3, 16)
    old, young = make_request("0", [0] * 16), make_request("1", [1] * 16)
    start(manager, old)
    start(manager, young)
    manager.free(old)
    manager.free(young)
    assert free_order(manager) == [1, 2]
    assert start(manager, make_request("2", [0] * 16 + [2] * 16)) == ([1], [2])


def test_k6_an_allocation_that_does_not_fit_changes_nothing() -> None:
    manager = KVManager(11, 16)
    first = make_request("0", COMMON)
    start(manager, first)
    other = make_request("1", [9] * 96)
    start(manager, other)
    before = free_order(manager)
    request = make_request("2", COMMON + [5] * 64)
    match = manager.match(request)
    assert [block.block_id for block in match.device] == [1, 2, 3]
    assert manager.allocate(request, 64, match) is None
    assert [block.refs for block in match.device] == [1, 1, 1]
    assert free_order(manager) == before
    assert manager.table("2") == []
    manager.check_integrity()


def test_k6_cached_blocks_that_nobody_holds_count_among_those_wanted() -> None:
    manager = KVManager(6, 16)
    cached = make_request("0", COMMON)
    start(manager, cached)
    start(manager, make_request("1", [9] * 16))
    manager.free(cached)
    assert manager.free_blocks == 4
    request = make_request("2", COMMON + [5] * 32)
    match = manager.match(request)
    assert match.tokens == 48
    assert manager.allocate(request, 32, match) is None, "3 blocks to wake and 2 to take"
    assert [block.refs for block in match.device] == [0, 0, 0]
    assert manager.allocate(request, 16, match) == [1, 2, 3, 5]
    manager.check_integrity()


@pytest.mark.parametrize(
    ("mine", "theirs", "hit"),
    [
        ({"salt": "a"}, {"salt": "a"}, 3),
        ({"salt": "a"}, {"salt": "b"}, 0),
        ({"salt": "a"}, {}, 0),
        ({"tenant": "acme"}, {"tenant": "acme"}, 3),
        ({"tenant": "acme"}, {"tenant": "beta"}, 0),
        ({"tenant": "acme", "salt": "shared"}, {"tenant": "beta", "salt": "shared"}, 3),
        ({"salt": "acme"}, {"tenant": "acme"}, 0),
        ({"adapter": "x"}, {"adapter": "y"}, 0),
    ],
)
def test_k7_only_the_same_salt_adapter_and_tenant_share(mine: dict[str, Any], theirs: dict[str, Any], hit: int) -> None:
    manager = KVManager(20, 16)
    start(manager, make_request("0", COMMON + [3] * 7, **mine))
    assert len(start(manager, make_request("1", COMMON + [3] * 7, **theirs))[0]) == hit


def test_k7_salt_enters_with_the_first_block_only() -> None:
    """Later blocks are named by their parent, so one root separates whole chains."""
    manager = KVManager(20, 16)
    request = make_request("0", COMMON, salt="a")
    start(manager, request)
    chain = request.block_hashes
    assert chain[1] == block_hash(chain[0], [1] * 16)


def test_k9_a_request_for_prompt_logprobs_reads_nothing_of_the_cache_and_still_writes_it() -> None:
    manager = KVManager(20, 16)
    first = make_request("0", COMMON + [3] * 7)
    start(manager, first)
    blind = make_request("1", COMMON + [3] * 7, read_cache=False)
    assert start(manager, blind) == ([], [5, 6, 7, 8])
    assert blind.block_hashes == first.block_hashes
    assert [key(manager, block_id) for block_id in (5, 6, 7)] == [key(manager, block_id) for block_id in (1, 2, 3)]
    manager.check_integrity()


def test_k10_reset_waits_until_nothing_is_held() -> None:
    manager = KVManager(11, 16)
    request = make_request("0", COMMON + [3] * 7)
    start(manager, request)
    assert not manager.reset_prefix_cache()
    assert key(manager, 1) is not None
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.match(make_request("1", COMMON + [3] * 7)).tokens == 0
    manager.check_integrity()


def test_k11_events_name_what_was_stored_evicted_and_cleared() -> None:
    manager = KVManager(4, 16, events=True)
    request = make_request("0", COMMON)
    start(manager, request)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == request.block_hashes
    assert len(stored.block_hashes) == 3
    assert stored.parent_block_hash is None
    assert stored.token_ids == COMMON
    assert stored.block_size == 16
    assert manager.take_events() == []

    manager.free(request)
    start(manager, longer := make_request("1", COMMON[:16] + [9] * 17))
    removed, added = manager.take_events()[:-1], manager.take_events()
    assert added == []
    assert {event.block_hashes[0] for event in removed if isinstance(event, BlockRemoved)} == set(
        request.block_hashes[1:]
    )

    manager.free(longer)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_k11_a_continuation_names_its_parent() -> None:
    manager = KVManager(11, 16, events=True)
    request = make_request("0", COMMON)
    assert manager.allocate(request, 20) is not None
    request.computed = 20
    assert manager.allocate(request, 28) is not None
    first, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == COMMON[16:]


def test_k12_without_caching_nothing_is_ever_found() -> None:
    manager = KVManager(5, 4, prefix_caching=False)
    request = make_request("0", range(10))
    assert start(manager, request) == ([], [1, 2, 3])
    request.tokens += [100, 101]
    assert manager.allocate(request, 2) == []
    assert manager.allocate(make_request("1", range(8)), 8) is None
    manager.free(request)
    assert start(manager, make_request("2", range(10)))[0] == []


def test_k15_the_hit_rate_is_that_of_the_latest_requests() -> None:
    window = HitWindow(5)
    window.observe(1, 20, 9)
    assert window.rate == pytest.approx(0.45)
    window.observe(4, 80, 16)
    assert window.rate == pytest.approx(0.25)
    window.observe(1, 10, 2)
    assert window.rate == pytest.approx(0.2)
    assert window.requests == 5


def test_k15_the_latest_observation_counts_however_large_and_none_after_a_reset() -> None:
    window = HitWindow(5)
    assert window.rate is None
    window.observe(2, 10, 10)
    window.observe(9, 100, 30)
    assert window.rate == pytest.approx(0.3)
    assert window.requests == 9
    window.observe(0, 0, 0)
    assert window.requests == 9
    window.reset()
    assert (window.rate, window.requests) == (None, 0)
