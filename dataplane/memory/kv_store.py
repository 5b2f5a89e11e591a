"""The KV tensors: one pool of keys and one of values per layer, and the host memory beside it.

Layer: state and memory. It holds bytes by block id and moves whole blocks as it is told; it does not know who owns a
block. Fresh memory is zero and is only touched when first written, so a large pool costs address space, not RAM,
until it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dataplane.models.shape import ModelShape
from dataplane.scheduling.plan import Moves, Transfers


class KVStore:
    """Keys and values, each [layers][H_k, blocks, block_size · d]: one block of one head is contiguous.

    `host_keys` and `host_values` have the same layout with `host_blocks` blocks of their own numbering.
    """

    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        size = (shape.kv_heads, num_blocks, block_size * shape.head_dim)
        self.keys = [_zeros(size) for _ in range(shape.layers)]
        self.values = [_zeros(size) for _ in range(shape.layers)]
        size = (shape.kv_heads, host_blocks, block_size * shape.head_dim)
        self.host_keys = [_zeros(size) for _ in range(shape.layers)]
        self.host_values = [_zeros(size) for _ in range(shape.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool on the device."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, H_k, d] at `slots` [T] = block · block_size + offset."""
        flat = (self.kv_heads, self.num_blocks * self.block_size, self.head_dim)
        self.keys[layer].view(flat).index_copy_(1, slots, k.transpose(0, 1))
        self.values[layer].view(flat).index_copy_(1, slots, v.transpose(0, 1))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks` in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[:, list(blocks)] = 0.0

    def export(self, block: int) -> Tensor:
        """A copy of one block of every layer, [2 · layers, H_k, block_size · d]: keys, then values."""
        return torch.stack([tensor[:, block] for tensor in (*self.keys, *self.values)])

    def load(self, block: int, content: Tensor) -> None:
        """Write what `export` gave, of this pool or of another for the same model, into one block."""
        for tensor, part in zip((*self.keys, *self.values), content, strict=True):
            tensor[:, block] = part

    def move(self, transfers: Transfers) -> None:
        """Move whole blocks of every layer: out to host memory, then in from it, then copies on the device.

        Within each list a pair sees what the pairs before it have done.
        """
        device, host = (*self.keys, *self.values), (*self.host_keys, *self.host_values)
        for sources, targets, moves in (
            (device, host, {to: block for block, to in transfers.swap_out}),
            (host, device, {to: block for block, to in transfers.swap_in}),
            (device, device, _in_one_go(transfers.copies)),
        ):
            if moves:
                to, blocks = torch.tensor(list(moves)), torch.tensor(list(moves.values()))
                for source, target in zip(sources, targets, strict=True):
                    target.index_copy_(1, to, source.index_select(1, blocks))

    def gather(self, layer: int, blocks: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` tables, flattened in `blocks` [rows · n] → [rows, H_k, n · block_size, d]."""
        size = (self.kv_heads, rows, -1, self.head_dim)
        keys = self.keys[layer].index_select(1, blocks).view(size)
        values = self.values[layer].index_select(1, blocks).view(size)
        return keys.transpose(0, 1), values.transpose(0, 1)


def _in_one_go(copies: Moves) -> dict[int, int]:
    """For each block that `copies` write, the block that holds now what it holds after them."""
    origin: dict[int, int] = {}
    for block, to in copies:
        origin[to] = origin.get(block, block)
    return origin


def _zeros(size: tuple[int, ...]) -> Tensor:
    """Zero pages straight from the system (calloc), unlike torch.zeros, which writes every byte."""
    return torch.from_numpy(np.zeros(size, dtype=np.float32))
