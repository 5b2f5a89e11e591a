"""Samples of one prompt share its blocks; who writes into a shared block gets a copy of it (PagedAttention 4.4)."""

from __future__ import annotations

import pytest

from dataplane.errors import IntegrityError
from dataplane.memory.manager import KVManager
from dataplane.request import Request
from tests.dataplane.memory.helpers import append, start
from tests.factories.requests import make_request

SIZE = 16


def samples(manager: KVManager, prompt_len: int, n: int) -> list[Request]:
    """One prompt computed once, and n − 1 forks of it."""
    parent = make_request("0", range(prompt_len))
    start(manager, parent)
    children = [make_request(str(index), range(prompt_len)) for index in range(1, n)]
    for child in children:
        manager.fork(parent, child)
        child.computed = prompt_len
    manager.check_integrity()
    return [parent, *children]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 40, 48])
@pytest.mark.parametrize("reserved", [False, True])
def test_n_samples_copy_n_minus_one_blocks_exactly_when_the_prompt_ends_inside_one(
    prompt_len: int, n: int, *, reserved: bool
) -> None:
    manager = KVManager(200, SIZE)
    requests = samples(manager, prompt_len, n)
    assert manager.pool.used == -(-prompt_len // SIZE)
    assert not manager.take_transfers()
    outputs, inside = 40, prompt_len % SIZE != 0
    reserve = prompt_len + outputs if reserved else 0
    copies: list[tuple[int, int]] = []
    for step in range(outputs):
        for index, request in enumerate(requests):
            before = manager.table(request.request_id)
            request.tokens.append(100 + index)
            new = manager.allocate(request, 1, reserve=reserve)
            assert new is not None
            request.computed += 1
            replaced = manager.take_replaced(request.request_id)
            if replaced is not None:
                before[replaced[0]] = replaced[1]
                assert replaced[0] == prompt_len // SIZE
            assert manager.table(request.request_id) == before + new
            assert manager.take_replaced(request.request_id) is None
        moved = manager.take_transfers()
        assert not moved.swap_in
        assert not moved.swap_out
        assert not (step and moved)
        copies += moved.copies
        manager.check_integrity()
    assert len(copies) == manager.copied == (n - 1 if inside else 0)
    full = prompt_len // SIZE
    tail = -(-(prompt_len + outputs) // SIZE) - full
    assert manager.pool.used == full + n * tail
    for request in requests:
        manager.free(request)
    assert manager.free_blocks == manager.pool.usable


def test_the_last_holder_writes_in_place() -> None:
    manager = KVManager(20, SIZE)
    parent, first, second = samples(manager, 20, 3)
    manager.free(parent)
    manager.free(first)
    assert append(manager, second, 7) == []
    assert manager.copied == 0
    assert manager.table("2") == [1, 2]


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    manager = KVManager(3, SIZE)
    parent, child = samples(manager, 20, 2)
    parent.tokens.append(7)
    assert manager.allocate(parent, 1) is None
    assert (manager.table("0"), manager.table("1")) == ([1, 2], [1, 2])
    assert manager.take_replaced("0") is None
    manager.check_integrity()
    manager.free(child)
    assert manager.allocate(parent, 1) == []
    assert not manager.take_transfers()


def test_the_source_of_a_copy_is_not_given_away_before_the_step_has_copied_it() -> None:
    manager = KVManager(4, SIZE, host_blocks=4)
    parent, child = samples(manager, 20, 2)
    append(manager, parent, 7)
    manager.free(child)
    assert manager.allocate(make_request("9", range(500, 516)), 16) is None, "the source was the only block left"
    assert manager.take_transfers().copies == ((2, 3),)
    assert manager.allocate(make_request("9", range(500, 516)), 16) == [2]
    manager.check_integrity()


def test_full_blocks_that_forks_fill_are_named_by_their_own_tokens() -> None:
    manager = KVManager(20, 4)
    parent, child = samples(manager, 6, 2)
    append(manager, parent, 50, 51)
    append(manager, child, 60, 61)
    for tail in ((50, 51), (60, 61)):
        assert manager.match(make_request("9", [*range(6), *tail, 0])).tokens == 8
    assert manager.match(make_request("9", [*range(6), 50, 61, 0])).tokens == 4


def test_a_fork_may_begin_at_an_earlier_point_than_its_parent_has_reached() -> None:
    manager = KVManager(20, 4)
    parent = make_request("0", range(8))
    start(manager, parent)
    child = make_request("1", range(6))
    manager.fork(parent, child)
    child.computed = 6
    assert append(manager, parent, 50) == [3]
    assert manager.copied == 0, "the parent is past the block they share"
    append(manager, child, 60, 61)
    assert manager.take_replaced("1") == (1, 4)
    assert manager.take_transfers().copies == ((2, 4),)
    assert manager.match(make_request("8", [*range(6), 60, 61, 0])).tokens == 8
    assert manager.match(make_request("9", [*range(8), 0])).tokens == 8


def test_a_copy_this_step_still_makes_is_not_swapped_out_in_it() -> None:
    manager = KVManager(20, SIZE, host_blocks=8)
    parent, child = samples(manager, 20, 2)
    append(manager, parent, 7)
    assert not manager.swap_out(parent)
    assert manager.swap_out(child)
    manager.take_transfers()
    assert manager.swap_out(parent)


def test_a_fork_of_what_is_not_computed_is_refused() -> None:
    manager = KVManager(20, SIZE)
    parent = make_request("0", range(40))
    assert manager.allocate(parent, 20) is not None
    with pytest.raises(IntegrityError, match="KV for 20 tokens, its fork 40"):
        manager.fork(parent, make_request("1", range(40)))
    manager.check_integrity()
