"""The free blocks, in the order in which they will be taken.

Layer: state and memory. Pure, torch-free. A doubly linked list threaded through the blocks themselves: take
from the head, give back at the tail, pull out of the middle, each in O(1) and without allocating.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dataplane.errors import IntegrityError


class Block:
    """One KV block. `refs` counts the tables that hold it; `key` is its hash while it is indexed, and `parent` that of
    the block before it in its chain, None at the start.

    What a `suspect` block holds is not to be trusted; it is to be cleared once nobody holds it. So is a `stale` one,
    unless its holder has filled it: what an earlier holder left in the other slots may not be to be trusted. `written`
    says that it was taken since it was last cleared.
    """

    __slots__ = ("before", "behind", "block_id", "key", "parent", "refs", "stale", "suspect", "written")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.refs = 0
        self.suspect = self.stale = self.written = False
        self.key: bytes | None = None
        self.parent: bytes | None = None
        self.before: Block | None = None
        self.behind: Block | None = None


class NoFreeBlocksError(Exception):
    """The free queue is empty."""


class FreeQueue:
    """Least recently freed first. A block is linked exactly while it is free."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head, self._tail = Block(-1), Block(-1)
        self._head.behind, self._tail.before = self._tail, self._head
        self._count = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        block = self._head.behind
        while block is not None and block is not self._tail:
            yield block
            block = block.behind

    def popleft(self) -> Block:
        """Take the block that was freed longest ago. Raises NoFreeBlocksError."""
        block = self._head.behind
        if block is None or block is self._tail:
            raise NoFreeBlocksError("No free blocks available")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take `block` out, wherever it stands."""
        before, behind = block.before, block.behind
        if before is None or behind is None:
            raise IntegrityError(f"block {block.block_id} is not in the free queue")
        before.behind, behind.before = behind, before
        block.before = block.behind = None
        self._count -= 1

    def append(self, block: Block) -> None:
        """Give `block` back, to be taken last."""
        assert self._tail.before is not None
        self._insert(block, self._tail.before)

    def prepend(self, block: Block) -> None:
        """Give `block` back, to be taken first: it holds nothing that anyone may want again."""
        self._insert(block, self._head)

    def _insert(self, block: Block, before: Block) -> None:
        """Link `block` in behind `before`."""
        if block.before is not None or block.behind is not None:
            raise IntegrityError(f"block {block.block_id} is in the free queue already")
        behind = before.behind
        assert behind is not None
        before.behind, block.before = block, before
        block.behind, behind.before = behind, block
        self._count += 1

    def check_integrity(self) -> None:
        """Raises IntegrityError if the links or the count are wrong."""
        seen, previous = 0, self._head
        for block in self:
            if block.before is not previous:
                raise IntegrityError(f"free queue: block {block.block_id} does not link back")
            seen, previous = seen + 1, block
        if self._tail.before is not previous or seen != self._count:
            raise IntegrityError(f"free queue holds {seen} blocks, counted {self._count}")
