"""What a request holds on the device, and what it may begin with.

Layer: state and memory. Pure, torch-free. Data of the manager's, which alone changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane.memory.free_queue import Block
from dataplane.memory.host_pool import HostBlock


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that begin a request: some on the device, those that follow in host memory. Nothing is held."""

    device: Sequence[Block] = ()
    host: Sequence[HostBlock] = ()
    block_size: int = 0

    @property
    def tokens(self) -> int:
        return (len(self.device) + len(self.host)) * self.block_size

    @property
    def host_tokens(self) -> int:
        """Those of `tokens` that must be copied from host memory."""
        return len(self.host) * self.block_size


NO_MATCH = PrefixMatch()


@dataclass(slots=True)
class Table:
    """One request's blocks, in order of position; the first `hashed` of them are in the prefix index.

    `tokens` positions hold KV once the step being planned has run; `forked` says that the block of the next position
    may be shared. Fewer than `quiet` tokens change nothing but `tokens`: they have their block, which is not shared,
    and fill none.
    """

    blocks: list[Block]
    hashed: int = 0
    tokens: int = 0
    forked: bool = False
    quiet: int = 0


def empty_slots(tables: Iterable[Table], size: int) -> int:
    """Slots in the tables' blocks of `size` slots that hold no token; a block of several tables counts once."""
    empty: dict[int, int] = {}
    for table in tables:
        for index in range(table.tokens // size, len(table.blocks)):
            block_id, filled = table.blocks[index].block_id, max(0, table.tokens - index * size)
            empty[block_id] = min(empty.get(block_id, size), size - filled)
    return sum(empty.values())
