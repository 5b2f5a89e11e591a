"""Which request holds which KV blocks.

Layer: state and memory. Pure, torch-free. Tables only grow while a request runs. An allocation is whole or
nothing: when it does not fit, no reference count has changed. It neither orders nor preempts requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.errors import IntegrityError
from dataplane.memory.block_pool import BlockPool
from dataplane.memory.events import EventLog
from dataplane.memory.free_queue import Block
from dataplane.memory.prefix_cache import extend_chain, root_hash
from dataplane.protocol import AllBlocksCleared, BlockRemoved, BlockStored
from dataplane.request import Request


@dataclass(slots=True)
class Table:
    """One request's blocks, in order of position; the first `hashed` of them are in the prefix index."""

    blocks: list[Block]
    hashed: int = 0


class KVManager:
    """Tables over one `BlockPool`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        kv_format: str = "",
        events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.kv_format = kv_format
        self.pool = BlockPool(num_blocks, EventLog(enabled=events, block_size=block_size))
        self._tables: dict[str, Table] = {}

    @property
    def free_blocks(self) -> int:
        return len(self.pool.free)

    def table(self, request_id: str) -> list[int]:
        """Block ids of a request, empty if it holds none."""
        table = self._tables.get(request_id)
        return [block.block_id for block in table.blocks] if table else []

    def held(self, request_id: str) -> int:
        """How many blocks a request holds."""
        table = self._tables.get(request_id)
        return len(table.blocks) if table else 0

    def match(self, request: Request) -> list[Block]:
        """Cached blocks that begin this request, at least one token short of all of it. Nothing is held yet."""
        if not self.prefix_caching:
            return []
        self._extend_hashes(request)
        usable = (request.wanted - 1) // self.block_size
        return self.pool.lookup(request.block_hashes[:usable])

    def allocate(
        self, request: Request, tokens: int, hits: Sequence[Block] = (), *, keep_free: int = 0
    ) -> list[int] | None:
        """Room for `tokens` more tokens of `request`, after the cached blocks `hits` on its first allocation.

        Returns the ids of the blocks appended to the table (hits included), or None, with nothing changed, if
        they do not fit or would leave fewer than `keep_free` blocks free.

            | hits (cached, shared) | new (owned) … | free slots of the last block |
            |←──── computed ───────→|←─ tokens ────→|
        """
        table = self._tables.get(request.request_id)
        held = len(table.blocks) if table else len(hits)
        computed = request.computed if table else len(hits) * self.block_size
        fresh = max(0, -(-(computed + tokens) // self.block_size) - held)
        waking = sum(1 for block in hits if block.refs == 0)
        if fresh + waking + keep_free > self.free_blocks:
            return None
        self.pool.touch(hits)
        taken = [*hits, *self.pool.take(fresh)]
        if table is None:
            table = self._tables[request.request_id] = Table([], hashed=len(hits))
        table.blocks.extend(taken)
        self._cache_full(request, table, computed + tokens)
        return [block.block_id for block in taken]

    def free(self, request: Request) -> None:
        """Take every block from a request; cached ones stay findable until they are taken."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.pool.release(table.blocks)

    def discard(self, request: Request) -> list[int]:
        """Like `free`, but what this request alone holds is not to be found again: its KV is not to be trusted.

        Returns those blocks' ids; they must be cleared before anyone reads them, since a NaN survives a mask.
        """
        table = self._tables.get(request.request_id)
        alone = [block for block in table.blocks if block.refs == 1] if table else []
        for block in alone:
            if block.key is not None:
                self.pool.forget(block)
        self.free(request)
        return [block.block_id for block in alone]

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False while any block is held."""
        return self.pool.reset()

    def take_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        return self.pool.events.take()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tables and pool agree."""
        self.pool.check_integrity()
        held = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        for block in self.pool.blocks[1:]:
            if block.refs != held[block.block_id]:
                raise IntegrityError(
                    f"block {block.block_id} counts {block.refs} holders, tables {held[block.block_id]}"
                )

    def _extend_hashes(self, request: Request) -> None:
        if (len(request.block_hashes) + 1) * self.block_size > request.wanted:
            return
        root = root_hash(kv_format=self.kv_format, adapter=request.adapter, salt=request.salt, tenant=request.tenant)
        extend_chain(request.block_hashes, root, request.tokens, self.block_size)

    def _cache_full(self, request: Request, table: Table, known: int) -> None:
        """Index the blocks that are full once the step being planned has run.

        A step writes its KV before any of its queries reads, so a later request of the same step may hit them.
        """
        full = min(known, request.wanted) // self.block_size
        if not self.prefix_caching or full <= table.hashed:
            return
        self._extend_hashes(request)
        start, size = table.hashed, self.block_size
        parent = request.block_hashes[start - 1] if start else None
        self.pool.cache(
            table.blocks[start:full],
            request.block_hashes[start:full],
            parent,
            request.tokens[start * size : full * size],
        )
        table.hashed = full
