"""Requests whose KV waits in host memory.

Layer: state and memory. Pure, torch-free. Full blocks are kept under their hash, so that requests with a common
prefix share one host copy and a request that came back leaves its prefix findable. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from dataplane.memory.free_queue import Block
from dataplane.memory.host_pool import HostBlock, HostPool
from dataplane.memory.moves import MoveLog


@dataclass(slots=True)
class Swapped:
    """One request's blocks in order of position: `tokens` positions, the first `hashed` blocks under their hash.

    `trusted` says that nothing is known against what they hold, `stale` that there is something against what may be in
    slots without a position, of the blocks without a hash.
    """

    blocks: list[HostBlock]
    hashed: int
    tokens: int
    trusted: bool = True
    stale: bool = False


class SwapSpace:
    """Swapped requests by id, over one `HostPool`."""

    def __init__(self, host: HostPool, moves: MoveLog) -> None:
        self._host = host
        self._moves = moves
        self._swapped: dict[str, Swapped] = {}

    def __len__(self) -> int:
        return len(self._swapped)

    def get(self, request_id: str) -> Swapped | None:
        return self._swapped.get(request_id)

    def held(self) -> list[HostBlock]:
        """Every block held, once for each holder."""
        return [block for swapped in self._swapped.values() for block in swapped.blocks]

    def put(self, request_id: str, blocks: Sequence[Block], hashed: int, tokens: int) -> int | None:
        """Copy a request's blocks out; how many had to move, because the host did not have them.

        None, with nothing changed, when they do not fit or one of them is still to be filled by this step's moves.
        """
        here = [self._host.get(block.key) if block.key is not None else None for block in blocks[:hashed]]
        known = [block for block in here if block is not None]
        waking = sum(1 for block in known if block.refs == 0)
        fresh = len(blocks) - len(known)
        here += [None] * (len(blocks) - hashed)
        moving = [block for block, copy in zip(blocks, here, strict=True) if copy is None]
        if fresh + waking > len(self._host.free) or not all(self._moves.settled(block) for block in moving):
            return None
        self._host.touch(known)
        taken = iter(self._host.take(fresh))
        copies = [copy or next(taken) for copy in here]
        for index, block in enumerate(blocks):
            if here[index] is None:
                self._moves.out(block, copies[index])
                if index < hashed and block.key is not None:
                    self._host.name(copies[index], block.key, block.parent)
        self._swapped[request_id] = Swapped(copies, hashed, tokens)
        return fresh

    def distrust(self, keys: Set[bytes]) -> None:
        """Who has one of these contents is not to be brought back. The host still knows them by name.

        What anyone has in blocks without a name may lie beside what is not to be trusted.
        """
        for swapped in self._swapped.values():
            swapped.stale = True
            swapped.trusted = swapped.trusted and not any(block.key in keys for block in swapped.blocks)

    def pop(self, request_id: str) -> list[HostBlock]:
        """Forget a request; its blocks, which the caller must release."""
        swapped = self._swapped.pop(request_id, None)
        return swapped.blocks if swapped else []
