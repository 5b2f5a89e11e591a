"""The free queue keeps order through takes from the head, the middle and gives at the tail."""

from __future__ import annotations

import pytest

from dataplane.errors import IntegrityError
from dataplane.memory.free_queue import Block, FreeQueue, NoFreeBlocksError


def ids(queue: FreeQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_k1_pop_remove_append_and_exhaustion() -> None:
    blocks = [Block(index) for index in range(5)]
    queue = FreeQueue(blocks)
    assert queue.popleft().block_id == 0
    queue.remove(blocks[2])
    assert blocks[1].behind is blocks[3]
    assert blocks[3].before is blocks[1]
    queue.append(blocks[2])
    assert ids(queue) == [1, 3, 4, 2]
    queue.check_integrity()
    assert [queue.popleft().block_id for _ in range(4)] == [1, 3, 4, 2]
    assert len(queue) == 0
    with pytest.raises(NoFreeBlocksError, match="No free blocks available"):
        queue.popleft()


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
