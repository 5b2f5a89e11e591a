"""KV blocks in host memory: those of swapped requests, and prefixes that the device had to evict.

Layer: state and memory. Pure, torch-free. A host block is in the free queue exactly while nobody holds it; a free
one may still hold a cached prefix, which is forgotten when the block is taken for something else. Swapped requests
hold their blocks and cached prefixes do not, so a prefix never keeps a request out.

    free queue:  head [ empty | cached prefixes, least recently used … most recently used ] tail
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataplane.errors import IntegrityError
from dataplane.memory.free_queue import Block, FreeQueue, NoFreeBlocksError


class HostBlock(Block):
    """One KV block in host memory; `refs` counts the swapped requests and the pending moves that hold it."""

    __slots__ = ()


class HostPool:
    """`size` host blocks, none of them reserved. A content is here once at most."""

    def __init__(self, size: int) -> None:
        self.blocks = [HostBlock(block_id) for block_id in range(size)]
        self.free = FreeQueue(self.blocks)
        self._index: dict[bytes, HostBlock] = {}

    @property
    def size(self) -> int:
        return len(self.blocks)

    @property
    def used(self) -> int:
        """Blocks that are held."""
        return len(self.blocks) - len(self.free)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their content, held or not."""
        return len(self._index)

    def get(self, key: bytes) -> HostBlock | None:
        return self._index.get(key)

    def lookup(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """Blocks for the longest known prefix of `hashes`. Nothing is held yet."""
        found = []
        for key in hashes:
            block = self._index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: Iterable[HostBlock]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            if block.refs == 0:
                self.free.remove(block)
            block.refs += 1

    def take(self, count: int) -> list[HostBlock]:
        """`count` blocks to write to. What they cached is forgotten. Raises NoFreeBlocksError and takes none."""
        if count > len(self.free):
            raise NoFreeBlocksError(f"{count} host blocks wanted, {len(self.free)} free")
        taken = []
        for _ in range(count):
            block = self.blocks[self.free.popleft().block_id]
            self._forget(block)
            block.refs = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[HostBlock]) -> None:
        """Give blocks back, tail first; the empty ones are the next to be taken."""
        for block in reversed(blocks):
            if block.refs <= 0:
                raise IntegrityError(f"host block {block.block_id} was released more often than it was held")
            block.refs -= 1
            if block.refs == 0:
                if block.key is None:
                    self.free.prepend(block)
                else:
                    self.free.append(block)

    def name(self, block: HostBlock, key: bytes, parent: bytes | None) -> None:
        """Make `block` findable by what it holds, after `parent`; nothing else here holds it."""
        block.key, block.parent = key, parent
        self._index[key] = block

    def admit(self, key: bytes, parent: bytes | None) -> HostBlock | None:
        """Room for a prefix that the device evicts: the block to copy it to, or None.

        None means that it is here already, and is now the last to go, or that swapped requests hold every block.
        """
        block = self._index.get(key)
        if block is not None:
            if block.refs == 0:
                self.free.remove(block)
                self.free.append(block)
            return None
        if not len(self.free):
            return None
        (block,) = self.take(1)
        self.name(block, key, parent)
        self.release([block])
        return block

    def parents(self) -> dict[bytes, bytes | None]:
        """Each content that is here, and what it follows."""
        return {key: block.parent for key, block in self._index.items()}

    def forget(self, keys: Iterable[bytes]) -> None:
        """Contents, those of them that are here, are not to be found again."""
        for key in keys:
            block = self._index.get(key)
            if block is not None:
                self._forget(block)

    def reset(self) -> None:
        """Forget every cached prefix. Nothing may be held."""
        self.forget(list(self._index))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless free queue, holders and index agree."""
        self.free.check_integrity()
        free = {block.block_id for block in self.free}
        for block in self.blocks:
            if (block.refs == 0) != (block.block_id in free):
                raise IntegrityError(
                    f"host block {block.block_id} has {block.refs} holders, free: {block.block_id in free}"
                )
            if block.key is not None and self._index.get(block.key) is not block:
                raise IntegrityError(f"host block {block.block_id} has a hash that the index does not know")
        if len(self._index) != sum(1 for block in self.blocks if block.key is not None):
            raise IntegrityError(f"the host index holds {len(self._index)} blocks, not those that carry a hash")

    def _forget(self, block: HostBlock) -> None:
        if block.key is not None:
            del self._index[block.key]
            block.key = None
