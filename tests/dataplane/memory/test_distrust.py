"""KV that is not to be trusted: nobody finds it, nor what was computed from it, and it is cleared once it is free."""

from __future__ import annotations

import pytest

from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from dataplane.memory.prefix_cache import descendants
from dataplane.request import Request
from tests.dataplane.memory.helpers import COMMON, append, start
from tests.factories.requests import make_request


def test_blocks_whose_content_is_not_to_be_trusted_are_forgotten_and_cleared_when_nobody_holds_them() -> None:
    """Not by those who share them; but nobody joins those, or what spoilt one request would spoil each that comes."""
    manager = KVManager(11, 16, host_blocks=4)
    good = make_request("0", COMMON[:16] + [9] * 8)
    start(manager, good)
    bad = make_request("1", COMMON)
    start(manager, bad)
    manager.distrust([bad])
    assert manager.match(make_request("2", [*COMMON, 5])).tokens == 0
    assert manager.take_scrub() == []
    manager.free(bad)
    assert (manager.take_scrub(), manager.take_scrub()) == ([3, 4], [])
    assert manager.match(make_request("2", [*COMMON, 5])).tokens == 0
    assert manager.table("0") == [1, 2]
    # In host memory it would be taken for sound.
    assert not manager.swap_out(good)
    append(manager, good, *[9] * 9)
    manager.free(good)
    # What it computed after the block that it shares, too.
    assert manager.take_scrub() == [1, 2, 5]
    assert start(manager, make_request("3", COMMON)) == ([], [6, 7, 8])
    manager.check_integrity()


def test_what_follows_kv_that_is_not_to_be_trusted_is_not_either() -> None:
    """Whoever shares a block has computed what comes after it from what it holds."""
    manager = KVManager(21, 4, host_blocks=4)
    bad, other, third = (make_request(str(length), range(length)) for length in (9, 40, 30))
    start(manager, bad)
    for request, computed in ((other, 18), (third, 21)):
        match = manager.match(request)
        assert manager.allocate(request, computed - match.tokens, match) is not None
        request.computed = computed
    assert manager.pool.index.get(other.block_hashes[3]) is not None
    manager.distrust([bad])
    assert manager.match(make_request("x", range(40))).tokens == 0
    # It goes on: none of its blocks is indexed, and all of them are cleared.
    assert manager.allocate(other, 22) is not None
    other.computed = 40
    assert manager.match(make_request("x", range(41))).tokens == 0
    held = {block for request in (bad, other, third) for block in manager.table(request.request_id)[:10]}
    for request in (bad, other, third):
        manager.free(request)
    assert set(manager.take_scrub()) == held
    assert (manager.pool.suspects, manager.pool.used) == (0, 0)
    manager.check_integrity()


def test_of_a_chain_what_follows_counts_and_what_has_lost_its_beginning() -> None:
    parents = {b"a": None, b"b": b"a", b"c": b"b", b"d": b"b", b"f": b"e", b"x": None, b"y": b"x"}
    assert descendants({b"b"}, parents) == {b"b", b"c", b"d", b"f"}
    assert descendants(set(), {b"a": None, b"b": b"a"}) == set()


def long_and_short(manager: KVManager) -> tuple[Request, Request]:
    """One with six full blocks, and another that shares the first two of them."""
    long, short = make_request("long", range(24)), make_request("short", range(9))
    start(manager, long)
    manager.take_transfers()
    assert start(manager, short)[0] == [1, 2]
    return long, short


def test_what_was_left_by_a_request_that_is_gone_is_not_found_either() -> None:
    manager = KVManager(20, 4, events=True)
    other = make_request("other", range(50, 60))
    start(manager, other)
    manager.free(other)
    assert manager.take_scrub() == []
    long, short = make_request("long", range(26)), make_request("short", range(9))
    start(manager, long)
    manager.free(long)
    start(manager, short)
    manager.take_events()
    manager.distrust([short])
    assert len(manager.take_events()) == 6, "an indexer is told"
    manager.free(short)
    assert manager.take_scrub() == [3, 4, 5, 6, 7, 8, 9, 10, 11], "whoever had a block without a name"
    again = make_request("again", range(9))
    start(manager, again)
    assert manager.match(make_request("x", range(25))).tokens == 8, "what is computed anew, and no more"
    assert manager.match(other).tokens == 8, "others keep theirs"
    manager.check_integrity()


def test_what_was_evicted_to_host_memory_is_not_found_either() -> None:
    manager = KVManager(8, 4, host_blocks=8)
    long, short = make_request("long", range(24)), make_request("short", range(9))
    start(manager, long)
    manager.free(long)
    big = make_request("big", [7] * 16)
    start(manager, big)
    manager.take_transfers()
    manager.free(big)
    assert manager.match(make_request("x", range(25))).host_tokens > 0
    start(manager, short)
    manager.take_transfers()
    manager.distrust([short])
    manager.free(short)
    assert manager.match(make_request("x", range(25))).tokens == 0
    assert start(manager, make_request("again", range(9)))[0] == []
    assert manager.match(make_request("x", range(25))).tokens == 8
    manager.check_integrity()


def test_what_a_swapped_request_computed_from_it_is_not_brought_back() -> None:
    manager = KVManager(20, 4, host_blocks=12)
    long, short = long_and_short(manager)
    long.computed = 24
    assert manager.swap_out(long)
    manager.take_transfers()
    manager.distrust([short])
    manager.free(short)
    assert manager.match(make_request("x", range(25))).tokens == 0
    assert not manager.trusts(long)
    with pytest.raises(IntegrityError, match="is not to be trusted"):
        manager.swap_in(long, 1)
    manager.drop_swapped(long)
    assert manager.trusts(long)
    assert manager.host.used == 0
    manager.check_integrity()


def test_a_swapped_request_keeps_what_came_before() -> None:
    """Another's failure after their common blocks says nothing of a chain that parted from it."""
    manager = KVManager(20, 4, host_blocks=12)
    kept = make_request("kept", range(12))
    start(manager, kept)
    kept.computed = 12
    assert manager.swap_out(kept)
    manager.take_transfers()
    start(manager, bad := make_request("bad", range(50, 60)))
    manager.distrust([bad])
    manager.free(bad)
    assert manager.trusts(kept)
    assert manager.swap_in(kept, 1) is not None
    assert manager.match(make_request("x", range(13))).tokens == 12
    manager.check_integrity()


def begun(manager: KVManager) -> tuple[Request, Request]:
    """Who shares a prefix with one that is gone, and who has begun to write to blocks that this one had filled.

    The one that is gone had the blocks 1 to 5. The other has 6, 5 and 4, and has filled half of the last.
    """
    gone, sharing = make_request("gone", range(17)), make_request("sharing", range(5))
    start(manager, gone)
    manager.free(gone)
    other = make_request("other", range(50, 60))
    assert start(manager, other)[1] == [6, 5, 4]
    assert start(manager, sharing) == ([1], [3])
    manager.take_transfers()
    return sharing, other


def test_what_a_holder_has_not_written_over_is_cleared_when_it_gives_the_block_back() -> None:
    """What was left lies beside what is sound, where no name tells of it."""
    manager = KVManager(7, 4)
    bad, other = begun(manager)
    manager.distrust([bad])
    assert manager.trusts(other)
    assert 4 not in manager.take_scrub(), "it is in use"
    manager.free(other)
    assert manager.take_scrub() == [4]
    assert manager.match(other).tokens == 8
    manager.check_integrity()


def test_what_nobody_wrote_over_is_cleared_where_the_next_holder_has_gone_too() -> None:
    manager = KVManager(7, 4)
    bad, other = begun(manager)
    manager.free(other)
    manager.distrust([bad])
    assert 4 in manager.take_scrub()
    manager.check_integrity()


def test_a_block_that_was_filled_meanwhile_is_kept() -> None:
    manager = KVManager(7, 4)
    bad, other = begun(manager)
    manager.distrust([bad])
    manager.free(bad)
    manager.take_scrub()
    append(manager, other, 60, 61, 62)
    manager.free(other)
    assert 4 not in manager.take_scrub()
    assert manager.match(make_request("x", range(50, 63))).tokens == 12
    manager.check_integrity()


def test_who_writes_beside_what_was_left_is_not_swapped_out() -> None:
    """Its block would be cleared before it is moved, as it is free."""
    manager = KVManager(7, 4, host_blocks=8)
    bad, other = begun(manager)
    manager.distrust([bad])
    assert not manager.swap_out(other)
    append(manager, other, 60, 61)
    assert manager.swap_out(other), "it has filled its block"
    assert 4 not in manager.take_scrub()
    manager.check_integrity()


def test_what_was_left_comes_back_with_who_was_swapped_out() -> None:
    manager = KVManager(7, 4, host_blocks=8)
    bad, other = begun(manager)
    assert manager.swap_out(other)
    manager.take_transfers()
    manager.distrust([bad])
    manager.free(bad)
    manager.take_scrub()
    manager.take_transfers()
    table = manager.swap_in(other, 1)
    assert table is not None
    manager.take_transfers()
    manager.free(other)
    assert manager.take_scrub() == table[2:]
    manager.check_integrity()


def test_what_was_left_goes_with_the_copy_of_a_block() -> None:
    """A copy is of the whole block, whatever its holder has written to it."""
    manager = KVManager(7, 4)
    bad, other = begun(manager)
    child = other.fork("child", 1)
    manager.fork(other, child)
    manager.distrust([bad])
    manager.free(bad)
    manager.take_scrub()
    append(manager, child, 60)
    replaced = manager.take_replaced("child")
    assert replaced is not None
    manager.take_transfers()
    manager.free(child)
    assert manager.take_scrub() == [replaced[1]]
    manager.check_integrity()


def test_a_block_that_nobody_took_since_it_was_cleared_is_not_cleared_again() -> None:
    """Nor one that was never used: it would cost memory that the system has not given yet."""
    manager = KVManager(20, 4)
    for name in ("a", "b"):
        request = make_request(name, range(10))
        start(manager, request)
        manager.distrust([request])
        manager.free(request)
        assert len(manager.take_scrub()) == 3
    manager.check_integrity()
