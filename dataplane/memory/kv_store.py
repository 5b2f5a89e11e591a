"""The KV tensors: one pool of keys and one of values per layer.

Layer: state and memory. It holds bytes by block id; it does not know who owns a block. Fresh memory is zero and
is only touched when first written, so a large pool costs address space, not RAM, until it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dataplane.models.shape import ModelShape


class KVStore:
    """Keys and values, each [layers][H_k, blocks, block_size · d]: one block of one head is contiguous."""

    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        size = (shape.kv_heads, num_blocks, block_size * shape.head_dim)
        self.keys = [_zeros(size) for _ in range(shape.layers)]
        self.values = [_zeros(size) for _ in range(shape.layers)]

    @property
    def nbytes(self) -> int:
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

    def gather(self, layer: int, blocks: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` tables, flattened in `blocks` [rows · n] → [rows, H_k, n · block_size, d]."""
        size = (self.kv_heads, rows, -1, self.head_dim)
        keys = self.keys[layer].index_select(1, blocks).view(size)
        values = self.values[layer].index_select(1, blocks).view(size)
        return keys.transpose(0, 1), values.transpose(0, 1)


def _zeros(size: tuple[int, ...]) -> Tensor:
    """Zero pages straight from the system (calloc), unlike torch.zeros, which writes every byte."""
    return torch.from_numpy(np.zeros(size, dtype=np.float32))
