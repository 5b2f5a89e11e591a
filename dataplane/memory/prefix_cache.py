"""Names for full KV blocks, and the index from name to block.

Layer: state and memory. Pure, torch-free. A block's hash is SHA-256 over its parent's hash and its tokens; the
chain starts from a root that holds the KV format, the adapter and the tenant's salt, so blocks of different
tenants, adapters or formats never meet. The index only finds; it owns no block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from hashlib import sha256

from dataplane.memory.free_queue import Block


def root_hash(*, kv_format: str, adapter: str, salt: str, tenant: str) -> bytes:
    """Where a chain starts. Without a salt the tenant isolates; a shared pool gives its tenants one salt."""
    digest = sha256(b"tidegate-kv-1")
    for part in (kv_format, adapter, "salt" if salt else "tenant", salt or tenant):
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block after `parent`."""
    return sha256(parent + array("I", tokens).tobytes()).digest()


def extend_chain(hashes: list[bytes], parent: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to `hashes` those of every full block of `tokens` that is not there yet.

    `parent` is the last that is there, or where the chain starts.
    """
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)


def descendants(keys: Set[bytes], parents: Mapping[bytes, bytes | None]) -> set[bytes]:
    """`keys`, and of `parents` (content → what it follows) those whose chain passes through them.

    One whose chain breaks off, because what it follows is known no longer, counts among them.

        root ─▶ a ─▶ b ─▶ c        of {b}: b, c, d; and f, whose e has been forgotten
                     └──▶ d
                (e)─▶ f
    """
    among = dict.fromkeys(keys, True)
    for key in parents:
        path: list[bytes] = []
        at: bytes | None = key
        while at is not None and at in parents and at not in among:
            path.append(at)
            at = parents[at]
        among |= dict.fromkeys(path, at is not None and among.get(at, True))
    return {key for key, found in among.items() if found}


class PrefixIndex:
    """Hash → blocks that hold it. Tables are append-only, so two blocks may hold the same content."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, dict[int, Block]] = {}

    def __len__(self) -> int:
        """Blocks indexed, duplicates counted."""
        return sum(len(blocks) for blocks in self._blocks.values())

    def get(self, key: bytes) -> Block | None:
        """The block that was indexed first under `key`."""
        blocks = self._blocks.get(key)
        return next(iter(blocks.values())) if blocks else None

    def all(self, key: bytes) -> Iterable[Block]:
        """Every block that is indexed under `key`."""
        return self._blocks.get(key, {}).values()

    def add(self, key: bytes, block: Block) -> bool:
        """Index `block`; True if `key` was not there before."""
        blocks = self._blocks.setdefault(key, {})
        blocks[block.block_id] = block
        return len(blocks) == 1

    def remove(self, key: bytes, block: Block) -> bool:
        """Forget `block`; True if no other block holds `key`."""
        blocks = self._blocks[key]
        del blocks[block.block_id]
        if blocks:
            return False
        del self._blocks[key]
        return True

    def clear(self) -> None:
        self._blocks.clear()

    def holds(self, key: bytes, block: Block) -> bool:
        return self._blocks.get(key, {}).get(block.block_id) is block
