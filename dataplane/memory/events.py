"""What happened to cached blocks, for whoever routes by prefix.

Layer: state and memory. Pure. It collects vLLM's event structs until they are taken; if nobody takes them it
forgets them all and says so (AllBlocksCleared), which makes an indexer know too little, never too much.
"""

from __future__ import annotations

from dataplane.protocol import AllBlocksCleared, BlockRemoved, BlockStored

MAX_PENDING = 65_536
MEDIUM = "CPU"


class EventLog:
    """Collects while `enabled`."""

    def __init__(self, *, enabled: bool, block_size: int, medium: str = MEDIUM) -> None:
        self.enabled = enabled
        self._block_size = block_size
        self._medium = medium
        self._pending: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def stored(self, hashes: list[bytes], parent: bytes | None, tokens: list[int]) -> None:
        self._record(BlockStored(hashes, parent, tokens, self._block_size, None, self._medium))

    def removed(self, key: bytes) -> None:
        self._record(BlockRemoved([key], self._medium))

    def cleared(self) -> None:
        self._record(AllBlocksCleared())

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Everything since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _record(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if not self.enabled:
            return
        if len(self._pending) >= MAX_PENDING:
            self._pending = [AllBlocksCleared()]
        self._pending.append(event)
