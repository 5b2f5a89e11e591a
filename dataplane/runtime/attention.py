"""Attention over the paged KV: the backend interface, and the torch backend for CPUs.

Layer: kernel and runtime. A backend plans once per step (what is gathered, which masks) and runs once per layer.
It writes the step's keys and values before it reads any, so requests of one step may share blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from dataplane.memory.kv_store import KVStore
from dataplane.models.llama import Attention
from dataplane.runtime.input_batch import StepInput

SMALL_TABLE = 16
"""Blocks below which decodes of different lengths share one padded gather."""


class AttentionBackend(Protocol):
    """Plan per step, run per layer. What `plan` returns refers to nothing but tensors of that step, the store and
    constants, so that an executor which records a step may replay it with new contents in the same tensors."""

    name: str

    def plan(self, step: StepInput) -> Attention:
        """Everything about this step that does not depend on the layer."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length: `at` [b] are their places in the step (None for all tokens of the step)."""

    at: Tensor | None
    rows: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One request's chunk: tokens `start`:`end` of the step; `mask` None means the chunk begins its sequence."""

    start: int
    end: int
    context: int
    blocks: Tensor
    mask: Tensor | None


class TorchAttention:
    """Gathers blocks into padded batches for decode and attends chunk by chunk for prefill.

    Query heads that share a key head are folded into the query length, so keys and values are never repeated.
    """

    name = "torch"

    def __init__(self, store: KVStore, heads: int) -> None:
        self._store = store
        self._heads = heads

    def plan(self, step: StepInput) -> Attention:
        groups = _decode_groups(step, self._store.block_size)
        group_size = self._heads // self._store.kv_heads
        spans = _prefill_spans(step, self._store.block_size, group_size)
        return TorchStep(self._store, self._heads, step.slots, groups, spans)


class TorchStep:
    """One planned step."""

    def __init__(
        self, store: KVStore, heads: int, slots: Tensor, groups: list[DecodeGroup], spans: list[PrefillSpan]
    ) -> None:
        self._store, self._heads, self._slots = store, heads, slots
        self._groups, self._spans = groups, spans

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, d], k and v [T, H_k, d] → [T, H · d]."""
        self._store.write(layer, self._slots, k, v)
        tokens, width = q.shape[0], q.shape[1] * q.shape[2]
        if len(self._groups) == 1 and self._groups[0].at is None:
            return self._decode(layer, q, self._groups[0])
        out = torch.empty((tokens, width), dtype=q.dtype)
        for group in self._groups:
            assert group.at is not None
            out[group.at] = self._decode(layer, q[group.at], group)
        for span in self._spans:
            out[span.start : span.end] = self._prefill(layer, q[span.start : span.end], k, v, span)
        return out

    def _decode(self, layer: int, q: Tensor, group: DecodeGroup) -> Tensor:
        """q [b, H, d] → [b, H · d]: each group of query heads is a short query over its key head."""
        kv_heads, dim = self._store.kv_heads, self._store.head_dim
        keys, values = self._store.gather(layer, group.blocks, group.rows)
        folded = q.view(group.rows, kv_heads, self._heads // kv_heads, dim)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask).reshape(group.rows, -1)

    def _prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, span: PrefillSpan) -> Tensor:
        count, kv_heads, dim = span.end - span.start, self._store.kv_heads, self._store.head_dim
        share = self._heads // kv_heads
        if span.mask is None:
            keys = k[span.start : span.end].transpose(0, 1).repeat_interleave(share, 0)
            values = v[span.start : span.end].transpose(0, 1).repeat_interleave(share, 0)
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), is_causal=True
            )
            return out.squeeze(0).transpose(0, 1).reshape(count, -1)
        keys, values = self._store.gather(layer, span.blocks, 1)
        folded = q.view(count, kv_heads, share, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, share * count, dim)
        out = F.scaled_dot_product_attention(
            folded, keys[:, :, : span.context], values[:, :, : span.context], attn_mask=span.mask
        )
        return out.view(kv_heads, share, count, dim).permute(2, 0, 1, 3).reshape(count, -1)


def _decode_groups(step: StepInput, block_size: int) -> list[DecodeGroup]:
    """Decodes in groups whose tables differ by less than a factor of two, so that padding stays below that."""
    if not step.decodes:
        return []
    lengths = step.starts[: step.decodes] + 1
    blocks = -(-lengths // block_size)
    classes = np.ceil(np.log2(np.maximum(blocks, SMALL_TABLE))).astype(np.int64)
    groups = []
    for size in np.unique(classes):
        members = np.flatnonzero(classes == size)
        width = int(blocks[members].max())
        valid = torch.from_numpy(np.arange(width * block_size) < lengths[members, None])
        mask = torch.zeros(valid.shape).masked_fill_(~valid, float("-inf"))[:, None, None, :]
        tables = torch.from_numpy(step.tables[members, :width].reshape(-1))
        whole = len(members) == len(step.positions)
        groups.append(DecodeGroup(None if whole else torch.from_numpy(members), len(members), tables, mask))
    return groups


def _prefill_spans(step: StepInput, block_size: int, group_size: int) -> list[PrefillSpan]:
    spans, at = [], step.decodes
    for index in range(step.decodes, len(step.request_ids)):
        start, count = int(step.starts[index]), int(step.counts[index])
        context = start + count
        blocks = torch.from_numpy(step.tables[index, : -(-context // block_size)].copy())
        mask = None
        if start:
            visible = torch.arange(context) <= torch.arange(start, context)[:, None]
            mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")).repeat(group_size, 1)
        spans.append(PrefillSpan(at, at + count, context, blocks, mask))
        at += count
    return spans
