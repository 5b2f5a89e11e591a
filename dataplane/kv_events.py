"""KV cache events in vLLM's wire format: tagged by class name, encoded as arrays (msgpack).

Layer: memory. A replica publishes them, an indexer reads them; engines that speak vLLM's format mix freely.
"""

from __future__ import annotations

import msgspec


class KVEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of vLLM's KV cache events: tagged by class name, encoded as arrays."""


class BlockStored(KVEvent, frozen=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(KVEvent, frozen=True):
    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(KVEvent, frozen=True):
    pass


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
