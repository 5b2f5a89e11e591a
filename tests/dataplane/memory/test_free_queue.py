"""The free queue keeps order through takes from the head, the middle and gives at the tail."""

from __future__ import annotations

import pytest

from dataplane.errors import IntegrityError
from dataplane.memory.free_queue import Block, FreeQueue


def ids(queue: FreeQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_what_is_worth_nothing_is_taken_first() -> None:
    blocks = [Block(index) for index in range(3)]
    queue = FreeQueue(blocks)
    queue.remove(blocks[1])
    queue.prepend(blocks[1])
    assert ids(queue) == [1, 0, 2]
    queue.check_integrity()
    with pytest.raises(IntegrityError, match="already"):
        queue.prepend(blocks[1])


def test_a_block_is_linked_once() -> None:
    block = Block(0)
    queue = FreeQueue([block])
    with pytest.raises(IntegrityError, match="already"):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(IntegrityError, match="not in the free queue"):
        queue.remove(block)


def test_a_broken_link_is_found() -> None:
    blocks = [Block(index) for index in range(3)]
    queue = FreeQueue(blocks)
    blocks[1].before = blocks[2]
    with pytest.raises(IntegrityError, match="does not link back"):
        queue.check_integrity()
