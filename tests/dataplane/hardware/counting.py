"""Counts the FLOPs and bytes that matrix products really take, to hold the cost model against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.linear.default)


class ProductCounter(TorchDispatchMode):
    """While active: `flops` of every matrix product, and which part of each watched tensor they read.

    A watched tensor is read from its start: what counts is the largest view of it that a product took.
    """

    def __init__(self, watched: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.flops = 0
        self._read = {tensor.untyped_storage().data_ptr(): 0 for tensor in watched}

    @property
    def bytes(self) -> int:
        """Bytes of the watched tensors that were read, each once."""
        return sum(self._read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            left, right = args[:2]
            self.flops += 2 * left.numel() * right.shape[0 if func is torch.ops.aten.linear.default else -1]
            for operand in (left, right):
                place = operand.untyped_storage().data_ptr()
                if place in self._read:
                    self._read[place] = max(self._read[place], operand.numel() * operand.element_size())
        elif func in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default):
            raise AssertionError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))


class CausalAttention:
    """Attention of one sequence that computes exactly the pairs it needs: each query over its own past.

    `keys` and `values` are [L, positions, H_k, d]; `computed` positions are there already.
    """

    def __init__(self, layers: int, positions: int, kv_heads: int, head_dim: int) -> None:
        self.keys = [torch.zeros(positions, kv_heads, head_dim) for _ in range(layers)]
        self.values = [torch.zeros(positions, kv_heads, head_dim) for _ in range(layers)]
        self.computed = 0

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """q [T, H · d], k and v [T, H_k · d] → [T, H · d]. Windows and caps are not counted."""
        assert window is None and softcap is None
        count, (kv_heads, dim) = len(q), self.keys[layer].shape[1:]
        q = q.view(count, -1, dim)
        heads = q.shape[1]
        self.keys[layer][self.computed : self.computed + count] = k.view(count, kv_heads, dim)
        self.values[layer][self.computed : self.computed + count] = v.view(count, kv_heads, dim)
        rows = []
        for index in range(count):
            seen = self.computed + index + 1
            folded = q[index].view(kv_heads, heads // kv_heads, dim)
            scores = torch.bmm(folded, self.keys[layer][:seen].permute(1, 2, 0)) * scale
            rows.append(torch.bmm(scores.softmax(-1), self.values[layer][:seen].transpose(0, 1)).reshape(1, -1))
        return torch.cat(rows)
