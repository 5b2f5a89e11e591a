"""The whole blocks to be moved before the step that is being planned.

Layer: state and memory. Pure. It collects, and holds what a move still reads until the step is taken, so that nothing
writes over it first. The executor runs the moves grouped: out, in, copies. Why that is right, whatever the order in
which they were asked for:

- out: the source has held its contents since an earlier step. One that a move of this step fills is not moved out.
- in: the source is held, so that no later move out is given the same host block.
- copies: likewise the source. No block is both read and written by them, so their order does not matter either.

Of two moves to one block the later counts: the block was given back in between. A copy does anyway, as it comes last.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.memory.block_pool import BlockPool
from dataplane.memory.free_queue import Block
from dataplane.memory.host_pool import HostBlock, HostPool
from dataplane.scheduling.plan import Transfers

NONE = Transfers()


class MoveLog:
    """Moves between blocks of `device` and `host` until they are taken."""

    def __init__(self, device: BlockPool, host: HostPool) -> None:
        self._device, self._host = device, host
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        self._copies: dict[int, int] = {}
        self.sources: dict[int, Block] = {}
        """Device blocks that copies read, by id: each is held once."""
        self.host_sources: list[HostBlock] = []
        """Host blocks that moves in read: each is held as often as it stands here."""

    def settled(self, block: Block) -> bool:
        """Whether a device block does not wait for a move to fill it."""
        return block.block_id not in self._in and block.block_id not in self._copies

    def out(self, source: Block, target: HostBlock) -> None:
        """Copy a settled device block to host memory."""
        self._out[target.block_id] = source.block_id

    def bring(self, sources: Sequence[HostBlock], targets: Sequence[Block]) -> None:
        """Copy host blocks to the device, and hold them meanwhile."""
        self._host.touch(sources)
        self.host_sources += sources
        for source, target in zip(sources, targets, strict=True):
            self._copies.pop(target.block_id, None)
            self._in[target.block_id] = source.block_id

    def copy(self, source: Block, target: Block) -> None:
        """Copy a device block. The caller's hold on `source` passes to the move, or is given back."""
        if source.block_id in self.sources:
            self._device.release([source])
        else:
            self.sources[source.block_id] = source
        # What is itself a copy of this step is taken from where that one comes from.
        self._copies[target.block_id] = self._copies.get(source.block_id, source.block_id)

    def take(self) -> Transfers:
        """Everything since the last call; what it reads is held no longer."""
        if not (self._out or self._in or self._copies):
            return NONE
        taken = Transfers(
            swap_out=tuple((device, host) for host, device in self._out.items()),
            swap_in=tuple((host, device) for device, host in self._in.items()),
            copies=tuple((source, target) for target, source in self._copies.items()),
        )
        self._device.release(list(self.sources.values()))
        self._host.release(self.host_sources)
        self._out, self._in, self._copies = {}, {}, {}
        self.sources, self.host_sources = {}, []
        return taken
