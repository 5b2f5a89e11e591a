"""The KV blocks: which are free, which are cached, how often each is held.

Layer: state and memory. Pure, torch-free. A block is in the free queue exactly while nobody holds it; a free
block may still be cached, and is forgotten only when it is taken for something else. It knows blocks and
hashes; it does not know requests.

    free queue:  head [ never used | cached, least recently freed … most recently freed ] tail
                 taken from here ↑                                        given back here ↑
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import groupby

from dataplane.errors import IntegrityError
from dataplane.memory.events import EventLog
from dataplane.memory.free_queue import Block, FreeQueue, NoFreeBlocksError
from dataplane.memory.prefix_cache import PrefixIndex

NULL_BLOCK = 0


class BlockPool:
    """`size` blocks, of which block 0 is the null block: padding points at it and no table owns it.

    `evicted` hears of each content that leaves with a block taken for something else, unless another block has it too.
    """

    def __init__(self, size: int, events: EventLog, evicted: Callable[[Block, bytes], None] | None = None) -> None:
        self.blocks = [Block(block_id) for block_id in range(size)]
        self.free = FreeQueue(self.blocks[1:])
        self.index = PrefixIndex()
        self.events = events
        self.evictions = 0
        self.takes = 0
        self._evicted = evicted
        self.suspects = 0
        """Blocks that are suspect now; all of them are held."""
        self.to_clear: set[int] = set()
        """Ids of free blocks that may hold what is not to be trusted, and are still to be cleared."""
        self.blocks[NULL_BLOCK].refs = 1

    @property
    def usable(self) -> int:
        """Blocks that requests can hold."""
        return len(self.blocks) - 1

    @property
    def used(self) -> int:
        """Blocks that at least one table holds."""
        return self.usable - len(self.free)

    @property
    def touched(self) -> int:
        """Blocks whose memory was ever written: never used ones are taken before any is taken twice."""
        return min(self.takes, self.usable)

    def lookup(self, hashes: Iterable[bytes]) -> list[Block]:
        """Cached blocks for the longest known prefix of `hashes`. Nothing is held yet."""
        found = []
        for key in hashes:
            block = self.index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: Iterable[Block]) -> None:
        """Hold cached blocks once more; a free one leaves the free queue."""
        for block in blocks:
            if block.refs == 0:
                self.free.remove(block)
            block.refs += 1

    def take(self, count: int) -> list[Block]:
        """`count` blocks to write to. What they cached is forgotten. Raises NoFreeBlocksError and takes none."""
        if count > len(self.free):
            raise NoFreeBlocksError(f"{count} blocks wanted, {len(self.free)} free")
        self.takes += count
        taken = []
        for _ in range(count):
            block = self.free.popleft()
            if block.key is not None:
                key = block.key
                last = self.forget(block)
                self.evictions += 1
                if last and self._evicted is not None:
                    self._evicted(block, key)
            block.refs, block.parent, block.written = 1, None, True
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Give a table back, tail first, so that the head of a prefix is evicted last."""
        for block in reversed(blocks):
            if block.refs <= 0:
                raise IntegrityError(f"block {block.block_id} was released more often than it was held")
            block.refs -= 1
            if block.refs == 0:
                self.free.append(block)
                if block.suspect or block.stale:
                    self.suspects -= block.suspect
                    block.suspect = block.stale = False
                    if block.key is None:
                        self.to_clear.add(block.block_id)

    def suspect(self, block: Block) -> None:
        """What a held block contains is not to be trusted: nobody finds it, and it is cleared once it is given back."""
        if block.key is not None:
            self.forget(block)
        self.suspects += not block.suspect
        block.suspect = True

    def parents(self) -> dict[bytes, bytes | None]:
        """Each content that is cached, and what it follows."""
        return {block.key: block.parent for block in self.blocks if block.key is not None}

    def distrust(self, keys: Set[bytes]) -> None:
        """Nobody finds these contents: blocks that are held become suspect, free ones are to be cleared."""
        for block in [block for key in keys for block in self.index.all(key)]:
            if block.refs:
                self.suspect(block)
            else:
                self.forget(block)
                self.to_clear.add(block.block_id)

    def clear_unnamed(self) -> None:
        """Have the blocks without a name cleared, those that are held once they are given back and have none then.

        A name says what every slot holds. A block without one may hold what anyone wrote to it since it was last
        cleared, and nothing tells who that was.
        """
        for block in self.blocks:
            if block.key is None and block.written:
                if block.refs:
                    block.stale = True
                else:
                    self.to_clear.add(block.block_id)

    def take_to_clear(self) -> list[int]:
        """Blocks to clear, since the last call."""
        taken, self.to_clear = sorted(self.to_clear), set()
        for block_id in taken:
            block = self.blocks[block_id]
            block.written = block.refs > 0 or block.key is not None
        return taken

    def cache(self, blocks: Sequence[Block], hashes: Sequence[bytes], parent: bytes | None, tokens: list[int]) -> None:
        """Index `blocks`, full ones that follow `parent`, under `hashes`; `tokens`, their contents, are for events."""
        fresh = []
        before = parent
        for block, key in zip(blocks, hashes, strict=True):
            block.key, block.parent = key, before
            fresh.append(self.index.add(key, block))
            before = key
        if not self.events.enabled:
            return
        width = len(tokens) // max(1, len(blocks))
        for new, run in groupby(range(len(blocks)), key=fresh.__getitem__):
            if new:
                places = list(run)
                first, last = places[0], places[-1]
                before = hashes[first - 1] if first else parent
                self.events.stored(list(hashes[first : last + 1]), before, tokens[first * width : (last + 1) * width])

    def forget(self, block: Block) -> bool:
        """Take `block` out of the index; True if no other block holds the same content."""
        assert block.key is not None
        last = self.index.remove(block.key, block)
        if last:
            self.events.removed(block.key)
        block.key = None
        return last

    def reset(self) -> bool:
        """Forget every cached block. False, and nothing done, while any block is held."""
        if self.used:
            return False
        for block in self.free:
            block.key = None
        self.index.clear()
        self.events.cleared()
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError unless free queue, reference counts and index agree."""
        self.free.check_integrity()
        free = {block.block_id for block in self.free}
        if NULL_BLOCK in free or self.blocks[NULL_BLOCK].refs != 1:
            raise IntegrityError("the null block was given away")
        keyed = 0
        for block in self.blocks:
            if (block.refs == 0) != (block.block_id in free):
                raise IntegrityError(f"block {block.block_id} has {block.refs} holders, free: {block.block_id in free}")
            if block.key is not None:
                keyed += 1
                if not self.index.holds(block.key, block):
                    raise IntegrityError(f"block {block.block_id} has a hash that the index does not know")
                if block.suspect:
                    raise IntegrityError(f"block {block.block_id} is not to be trusted and can be found")
        if keyed != len(self.index):
            raise IntegrityError(f"the prefix index holds {len(self.index)} blocks, {keyed} carry a hash")
