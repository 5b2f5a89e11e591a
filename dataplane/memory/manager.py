"""Which request holds which KV blocks, on the device and in host memory.

Layer: state and memory. Pure, torch-free. Tables only grow while a request runs; one entry may change, when the block
that a request shares and is about to write to is copied. An allocation is whole or nothing: when it does not fit, no
reference count has changed. It neither orders nor preempts requests.

Its state is that after the step being planned: blocks that the step fills are findable at once, since a step writes
its KV before any of its queries reads. So a request that was given room for a step is not taken out of that step:
`free`, `discard` and `swap_out` are for requests that the step being planned does not compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dataplane.errors import IntegrityError
from dataplane.memory.block_pool import BlockPool
from dataplane.memory.events import EventLog
from dataplane.memory.free_queue import Block
from dataplane.memory.hit_window import HitWindow
from dataplane.memory.host_pool import HostBlock, HostPool
from dataplane.memory.moves import MoveLog
from dataplane.memory.prefix_cache import descendants, extend_chain, root_hash
from dataplane.memory.swap import SwapSpace
from dataplane.memory.tables import NO_MATCH, PrefixMatch, Table, empty_slots
from dataplane.protocol import AllBlocksCleared, BlockRemoved, BlockStored
from dataplane.request import Request
from dataplane.scheduling.plan import Transfers


class KVManager:
    """Tables over one `BlockPool`, and `host_blocks` blocks of host memory behind it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        kv_format: str = "",
        events: bool = False,
        host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.kv_format = kv_format
        log = EventLog(enabled=events, block_size=block_size)
        self.pool = BlockPool(num_blocks, log, self._offload if host_blocks else None)
        self.host = HostPool(host_blocks)
        self.offloaded = self.swapped_out = self.swapped_in = self.copied = 0
        """Blocks moved since the start: evicted prefixes, swapped requests out and in, copies on write."""
        self.recent_hits = HitWindow()
        """Of the requests that looked for their prefix when they first began to run; whoever starts them tells it."""
        self._moves = MoveLog(self.pool, self.host)
        self._swap = SwapSpace(self.host, self._moves)
        self._tables: dict[str, Table] = {}
        self._replaced: dict[str, tuple[int, int]] = {}

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def free_blocks(self) -> int:
        return len(self.pool.free)

    @property
    def empty_slots(self) -> int:
        """Slots of held blocks that no token will fill in this step: internal waste; a shared block counts once."""
        return empty_slots(self._tables.values(), self.block_size)

    @property
    def useful_share(self) -> float | None:
        """Share of the allocated slots that hold tokens (PagedAttention, figure 2); None when nothing is allocated."""
        slots = self.pool.used * self.block_size
        return 1 - self.empty_slots / slots if slots else None

    def table(self, request_id: str) -> list[int]:
        """Block ids of a request, empty if it holds none."""
        table = self._tables.get(request_id)
        return [block.block_id for block in table.blocks] if table else []

    def held(self, request_id: str) -> int:
        """How many blocks a request holds on the device."""
        table = self._tables.get(request_id)
        return len(table.blocks) if table else 0

    def is_swapped(self, request_id: str) -> bool:
        return self._swap.get(request_id) is not None

    def swapped_tokens(self, request_id: str) -> int:
        """Positions whose KV a swapped request has in host memory; 0 if it is not swapped."""
        swapped = self._swap.get(request_id)
        return swapped.tokens if swapped else 0

    # ---------------------------------------------------------------------------------------------------- allocations

    def match(self, request: Request) -> PrefixMatch:
        """Cached blocks that begin this request, at least one token short of all of it. Nothing is held yet.

        It holds good until anything is allocated.
        """
        if not self.prefix_caching or not request.read_cache:
            return NO_MATCH
        self._extend_hashes(request)
        usable = (request.wanted - 1) // self.block_size
        device = self.pool.lookup(request.block_hashes[:usable])
        host = self.host.lookup(request.block_hashes[len(device) : usable])
        return PrefixMatch(device, host, self.block_size)

    def allocate(
        self,
        request: Request,
        tokens: int,
        match: PrefixMatch = NO_MATCH,
        *,
        keep_free: int = 0,
        reserve: int = 0,
    ) -> list[int] | None:
        """Room for `tokens` more tokens of `request`, after the cached blocks of `match` on its first allocation.

        Returns the ids of the blocks appended to the table (hits included), or None, with nothing changed, if
        they do not fit or would leave fewer than `keep_free` blocks free. The table gets room for `reserve` tokens in
        all, if that is more; what fills those later is named by the allocation that counts it as computed.

            | device hits (shared) | host hits (copied in) | new (owned) … | free slots of the last block | reserve |
            |←───────────── computed ─────────────────────→|←─ tokens ────→|
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return self._begin(request, tokens, match, keep_free, reserve)
        size, known = self.block_size, request.computed + tokens
        if known < table.quiet and reserve <= len(table.blocks) * size:
            table.tokens = known
            return []
        fresh = max(0, -(-max(known, reserve) // size) - len(table.blocks))
        copies = tokens > 0 and table.forked and self._shares(table, request.computed)
        if (fresh or copies) and fresh + copies + keep_free > self.free_blocks:
            return None
        if copies:
            self._copy_on_write(request, table)
        table.forked = table.forked and tokens == 0
        table.tokens = known
        taken = self.pool.take(fresh) if fresh else []
        table.blocks.extend(taken)
        self._cache_full(request, table)
        unnamed = self.prefix_caching and known >= (table.hashed + 1) * size
        edge = min((known // size + 1) * size, len(table.blocks) * size + 1)
        table.quiet = 0 if table.forked or unnamed else edge
        return [block.block_id for block in taken]

    def extend(self, requests: Sequence[Request], start: int, stop: int) -> int:
        """Room for one token more of each of `requests[start:stop]`, up to the first that needs more than a new count.

        Returns how many got it. The token of the next completes a block, begins one, or writes to one that is shared;
        or that request holds nothing.
        """
        tables, count = self._tables, 0
        for index in range(start, min(stop, len(requests))):
            request = requests[index]
            table = tables.get(request.request_id)
            known = request.computed + 1
            if table is None or known >= table.quiet:
                break
            table.tokens = known
            count += 1
        return count

    def take_replaced(self, request_id: str) -> tuple[int, int] | None:
        """(index in the table, new block id) if the request's last allocation copied a shared block; told once."""
        return self._replaced.pop(request_id, None)

    def fork(self, parent: Request, child: Request) -> None:
        """Give `child` the blocks of `parent` that its tokens fill. Nothing is copied until one of them writes.

        The child's tokens begin the parent's, tenant, salt and adapter are the same, and the parent has been given room
        for all of them; their KV is there once the step being planned has run.
        """
        table, size = self._tables[parent.request_id], self.block_size
        length = len(child.tokens)
        full, count = length // size, -(-length // size)
        if length > table.tokens:
            raise IntegrityError(f"request {parent.request_id} has KV for {table.tokens} tokens, its fork {length}")
        child.block_hashes[:] = parent.block_hashes[:full]
        shared = table.blocks[:count]
        self.pool.touch(shared)
        partial = count > full
        table.forked, table.quiet = table.forked or partial, 0
        self._tables[child.request_id] = Table(shared, min(table.hashed, full), length, forked=partial)

    def free(self, request: Request) -> None:
        """Take every block from a request, in host memory too; cached ones stay findable until they are taken."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            if self.pool.suspects:
                self._spread(table)
            self.pool.release(table.blocks)
            self._replaced.pop(request.request_id, None)
        self.drop_swapped(request)

    def distrust(self, requests: Iterable[Request]) -> None:
        """What these requests hold is not to be found from now on: their KV is not to be trusted.

        They and those who share a block keep it, and nobody joins them; it is to be cleared when the last has given it
        back. So is what anyone has computed after such a block, and will compute: those who share it, those who have
        gone and left theirs in the cache, and those who are swapped out. And so is what they left where others have
        begun to write since, who leave the rest of a block as it was. One pass over both tiers.
        """
        tables = [self._tables[request.request_id] for request in requests if request.request_id in self._tables]
        keys: set[bytes] = set()
        for table in tables:
            keys |= self._suspect(table.blocks)
        if not keys and not self.pool.suspects:
            return
        keys |= self._spread_all()
        keys = descendants(keys, self.pool.parents() | self.host.parents())
        self.pool.distrust(keys)
        self._spread_all()  # whose blocks after those have no name yet
        self._swap.distrust(keys)
        self.host.forget(keys)
        self.pool.clear_unnamed()

    def trusts(self, request: Request) -> bool:
        """Whether nothing is known against the KV that the request has, on the device or in host memory."""
        table, swapped = self._tables.get(request.request_id), self._swap.get(request.request_id)
        suspect = table is not None and self.pool.suspects and _first_suspect(table) < len(table.blocks)
        return not suspect and (swapped is None or swapped.trusted)

    def scrub(self, blocks: Iterable[int]) -> None:
        """Have blocks cleared that a request holds and has no KV in yet."""
        self.pool.to_clear.update(blocks)

    def take_scrub(self) -> list[int]:
        """Blocks to clear before the moves of the step being planned, since the last call. A NaN survives a mask."""
        return self.pool.take_to_clear()

    # ---------------------------------------------------------------------------------------------------- host memory

    def swap_out(self, request: Request) -> bool:
        """Move a request's KV to host memory and free its blocks. False, and nothing changed, if it has no room there,
        or if its KV is not to be trusted, or in blocks to be cleared when they are free: that is before they are moved.

        Cached prefixes give way. Blocks that others hold as well stay where they are for those.
        """
        table = self._tables.get(request.request_id)
        if table is None or not table.tokens or any(block.suspect for block in table.blocks):
            return False
        blocks = table.blocks[: -(-table.tokens // self.block_size)]
        if any(block.stale and block.key is None for block in blocks):
            return False
        moved = self._swap.put(request.request_id, blocks, table.hashed, table.tokens)
        if moved is None:
            return False
        self.swapped_out += moved
        del self._tables[request.request_id]
        self._replaced.pop(request.request_id, None)
        self.pool.release(table.blocks)
        return True

    def swap_in(self, request: Request, tokens: int, *, keep_free: int = 0, reserve: int = 0) -> list[int] | None:
        """Bring a swapped request back, with room for `tokens` more; its whole new table, or None if it does not fit.

        What the device's cache still has of it is shared, not copied. `swapped_tokens` of it are computed. Its KV is to
        be trusted.
        """
        swapped = self._swap.get(request.request_id)
        if swapped is None:
            raise IntegrityError(f"request {request.request_id} is not in host memory")
        if not swapped.trusted:
            raise IntegrityError(f"what request {request.request_id} has in host memory is not to be trusted")
        hits = self.pool.lookup(request.block_hashes[: swapped.hashed])
        known = swapped.tokens + tokens
        table = self._new_table(hits, swapped.blocks[len(hits) :], known, keep_free, reserve)
        if table is None:
            return None
        for block in table.blocks[swapped.hashed : len(swapped.blocks)]:
            block.stale = swapped.stale
        self.swapped_in += len(swapped.blocks) - len(hits)
        self._tables[request.request_id] = table
        self.host.release(self._swap.pop(request.request_id))
        self._cache_full(request, table)
        return [block.block_id for block in table.blocks]

    def drop_swapped(self, request: Request) -> None:
        """Forget what a request has in host memory, if anything: it will be computed again, or never."""
        self.host.release(self._swap.pop(request.request_id))

    def take_transfers(self) -> Transfers:
        """The moves to make before the step that was planned; all since the last call."""
        return self._moves.take()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block in both tiers; False, and nothing done, while a request holds any in either."""
        if self.host.used or not self.pool.reset():
            return False
        self.host.reset()
        self.recent_hits.reset()
        return True

    def take_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """What became findable on the device and what no longer is. Host memory is not told of."""
        return self.pool.events.take()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tables and pools agree."""
        self.pool.check_integrity()
        self.host.check_integrity()
        tables = [block for table in self._tables.values() for block in table.blocks]
        _check_holders("block", self.pool.blocks[1:], [*tables, *self._moves.sources.values()])
        _check_holders("host block", self.host.blocks, [*self._swap.held(), *self._moves.host_sources])
        both = [request_id for request_id in self._tables if self.is_swapped(request_id)]
        if both:
            raise IntegrityError(f"request {both[0]} holds blocks and is swapped out")

    # ------------------------------------------------------------------------------------------------------ internals

    def _begin(
        self, request: Request, tokens: int, match: PrefixMatch, keep_free: int, reserve: int
    ) -> list[int] | None:
        """A request's first allocation."""
        table = self._new_table(match.device, match.host, match.tokens + tokens, keep_free, reserve)
        if table is None:
            return None
        self._tables[request.request_id] = table
        self._cache_full(request, table)
        return [block.block_id for block in table.blocks]

    def _new_table(
        self, hits: Sequence[Block], stored: Sequence[HostBlock], known: int, keep_free: int, reserve: int
    ) -> Table | None:
        """`hits` shared, `stored` brought from the host after them, free blocks up to `known` or `reserve` tokens.

        What is shared or brought is held before blocks are taken, so that taking them cannot evict it.
        """
        fresh = max(0, -(-max(known, reserve) // self.block_size) - len(hits))
        waking = sum(1 for block in hits if block.refs == 0)
        if fresh + waking + keep_free > self.free_blocks:
            return None
        self.pool.touch(hits)
        self.host.touch(stored)
        taken = self.pool.take(fresh)
        self._moves.bring(stored, taken[: len(stored)])
        self.host.release(stored)
        return Table([*hits, *taken], hashed=len(hits), tokens=known)

    def _holders(self, block: Block) -> int:
        """How many tables hold `block`; a copy still to be made holds it once more."""
        return block.refs - (block.block_id in self._moves.sources)

    def _shares(self, table: Table, position: int) -> bool:
        """Whether `position` goes into a block that is begun and that another table holds too."""
        index, offset = divmod(position, self.block_size)
        return offset > 0 and self._holders(table.blocks[index]) > 1

    def _copy_on_write(self, request: Request, table: Table) -> None:
        """Give the request a copy of the shared block it is about to write to.

        before: this table ─┐                    after: this table ──▶ target
                others ─────┴▶ source                   others, the copy ──▶ source
        """
        index = request.computed // self.block_size
        source, (target,) = table.blocks[index], self.pool.take(1)
        target.stale = source.stale
        if source.suspect:
            self.pool.suspect(target)
        self._moves.copy(source, target)
        self.copied += 1
        table.blocks[index] = target
        self._replaced[request.request_id] = (index, target.block_id)

    def _offload(self, block: Block, key: bytes) -> None:
        """The device is about to write over `block`, the last there to hold `key`: keep its contents on the host."""
        if not self._moves.settled(block):
            return
        copy = self.host.admit(key, block.parent)
        if copy is not None:
            self._moves.out(block, copy)
            self.offloaded += 1

    def _suspect(self, blocks: Iterable[Block]) -> set[bytes]:
        """These blocks are not to be trusted; the contents that were to be found in them."""
        keys = set()
        for block in blocks:
            if block.key is not None:
                keys.add(block.key)
            self.pool.suspect(block)
        return keys

    def _spread_all(self) -> set[bytes]:
        """The same for every table, whatever order they stand in; the contents that were to be found there."""
        keys: set[bytes] = set()
        before = -1
        while before < self.pool.suspects:
            before = self.pool.suspects
            for table in self._tables.values():
                keys |= self._spread(table)
        return keys

    def _spread(self, table: Table) -> set[bytes]:
        """What was computed after a block that is not to be trusted is not either."""
        return self._suspect(table.blocks[_first_suspect(table) :])

    def _extend_hashes(self, request: Request) -> None:
        if (len(request.block_hashes) + 1) * self.block_size > request.wanted:
            return
        hashes = request.block_hashes
        extend_chain(hashes, hashes[-1] if hashes else self._root(request), request.tokens, self.block_size)

    def _root(self, request: Request) -> bytes:
        return root_hash(kv_format=self.kv_format, adapter=request.adapter, salt=request.salt, tenant=request.tenant)

    def _cache_full(self, request: Request, table: Table) -> None:
        """Index the blocks that are full once the step being planned has run, whose tokens are known.

        One that is not to be trusted is not indexed, nor what follows it.
        """
        start, size = table.hashed, self.block_size
        full = min(table.tokens, len(request.tokens)) // size
        if not self.prefix_caching or full <= start:
            return
        if self.pool.suspects and (first := _first_suspect(table)) < full:
            full = first
            if full <= start:
                return
        self._extend_hashes(request)
        parent = request.block_hashes[start - 1] if start else None
        told = request.tokens[start * size : full * size] if self.pool.events.enabled else []
        self.pool.cache(table.blocks[start:full], request.block_hashes[start:full], parent, told)
        table.hashed = full


def _first_suspect(table: Table) -> int:
    """The index of the first block that is not to be trusted; the number of blocks if there is none."""
    return next((index for index, block in enumerate(table.blocks) if block.suspect), len(table.blocks))


def _check_holders(name: str, blocks: Sequence[Block], held: Iterable[Block]) -> None:
    """Raises IntegrityError unless each block counts as many holders as it has in `held`."""
    holders = Counter(block.block_id for block in held)
    for block in blocks:
        if block.refs != holders[block.block_id]:
            raise IntegrityError(
                f"{name} {block.block_id} counts {block.refs} holders, it has {holders[block.block_id]}"
            )
