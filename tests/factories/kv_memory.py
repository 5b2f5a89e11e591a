"""KV memory of both tiers as plain numbers, moved exactly as a plan says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from dataplane.scheduling.plan import Moves, Transfers


class KVMemory:
    """One number per slot. Within a group moves are made in random order: a plan may not rely on any."""

    def __init__(self, block_size: int, seed: int = 0) -> None:
        self._block_size = block_size
        self._random = Random(seed)
        self._device: dict[int, dict[int, int]] = {}
        self._host: dict[int, dict[int, int]] = {}

    def read(self, table: Sequence[int], position: int) -> int:
        """What the slot holds."""
        block, offset = self._slot(table, position)
        held = self._device.get(block, {})
        assert offset in held, f"slot {offset} of block {block} is read and was never written"
        return held[offset]

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        block, offset = self._slot(table, position)
        self._device.setdefault(block, {})[offset] = value

    def copy(self, block: int) -> dict[int, int]:
        """What a device block holds, by offset."""
        return dict(self._device[block])

    def holds(self, block: int) -> dict[int, int]:
        """The same; nothing if it was never written, or cleared."""
        return self._device.get(block, {})

    def load(self, block: int, content: dict[int, int]) -> None:
        """Fill a device block from elsewhere."""
        self._device[block] = dict(content)

    def clear(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._device.pop(block, None)

    def apply(self, transfers: Transfers) -> None:
        """Out, in, copies; every block is moved whole, with whatever it holds."""
        copied_to = {target for _, target in transfers.copies}
        assert not copied_to & {source for source, _ in transfers.copies}, "a copy reads what another one writes"
        for moves in (transfers.swap_out, transfers.swap_in, transfers.copies):
            assert len({target for _, target in moves}) == len(moves), "two moves write one block"
        self._move(transfers.swap_out, self._device, self._host)
        self._move(transfers.swap_in, self._host, self._device)
        self._move(transfers.copies, self._device, self._device)

    def _move(self, moves: Moves, source: dict[int, dict[int, int]], target: dict[int, dict[int, int]]) -> None:
        for start, end in self._random.sample(moves, len(moves)):
            target[end] = dict(source.get(start, {}))

    def _slot(self, table: Sequence[int], position: int) -> tuple[int, int]:
        block = table[position // self._block_size]
        assert block != 0, "the null block was written or read"
        return block, position % self._block_size
