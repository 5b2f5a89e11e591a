"""Attention over the paged KV: the backend interface, and the torch backend for CPUs.

Layer: kernel and runtime. A backend plans once per step (what is gathered, which masks) and runs once per layer.
It writes the step's keys and values before it reads any, so requests of one step may share blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from dataplane.kernels import ops
from dataplane.kernels.ops import Attention
from dataplane.memory.kv_store import KVStore
from dataplane.runtime.input_batch import Ints, StepInput

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
    """Decodes of similar length: `at` [b] are their places in the step (None for all tokens of the step).

    `lengths` [b] are the keys each sees, `width` the keys that are gathered for each.
    """

    at: Tensor | None
    rows: int
    blocks: Tensor
    lengths: Ints
    width: int

    def mask(self, window: int | None) -> Tensor:
        """0 where a query sees a key, −∞ elsewhere, [b, 1, 1, width]."""
        keys, ends = np.arange(self.width), self.lengths[:, None]
        seen = keys < ends
        if window is not None:
            seen &= keys >= ends - window
        return _mask(torch.from_numpy(seen))[:, None, None, :]


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One request's chunk: tokens `start`:`end` of the step, the first of them at position `first`."""

    start: int
    end: int
    first: int
    blocks: Tensor

    @property
    def context(self) -> int:
        """Keys of the request, this chunk's among them."""
        return self.first + self.end - self.start

    def mask(self, window: int | None) -> Tensor:
        """0 where a query sees a key, −∞ elsewhere, [tokens, context]."""
        keys, queries = torch.arange(self.context), torch.arange(self.first, self.context)[:, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return _mask(seen)


@dataclass(frozen=True, slots=True)
class Masks:
    """What the step's queries see through one window. A span's is None where its chunk begins its sequence and each
    token sees all before it."""

    groups: list[Tensor]
    spans: list[Tensor | None]


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
        return TorchStep(self._store, self._heads, step.slots, groups, _prefill_spans(step, self._store.block_size))


class TorchStep:
    """One planned step. Masks are made for the first layer that needs them and kept for the others."""

    def __init__(
        self, store: KVStore, heads: int, slots: Tensor, groups: list[DecodeGroup], spans: list[PrefillSpan]
    ) -> None:
        self._store, self._heads, self._slots = store, heads, slots
        self._share = heads // store.kv_heads
        self._groups, self._spans = groups, spans
        self._longest = max([int(group.lengths.max()) for group in groups] + [span.context for span in spans])
        self._masks: dict[int | None, Masks] = {}

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
        """As `Attention.run` says. q [T, H · d], k and v [T, H_k · d] → [T, H · d]."""
        tokens, dim = q.shape[0], self._store.head_dim
        heads, k, v = q.view(tokens, -1, dim), k.view(tokens, -1, dim), v.view(tokens, -1, dim)
        self._store.write(layer, self._slots, k, v)
        masks, score = self._seen(window), Score(scale, softcap)
        if len(self._groups) == 1 and self._groups[0].at is None:
            return self._decode(layer, heads, self._groups[0], masks.groups[0], score)
        out = torch.empty(q.shape, dtype=q.dtype)
        for group, seen in zip(self._groups, masks.groups, strict=True):
            assert group.at is not None
            out[group.at] = self._decode(layer, heads[group.at], group, seen, score)
        for span, mask in zip(self._spans, masks.spans, strict=True):
            part = slice(span.start, span.end)
            if mask is None:
                out[part] = self._begin(heads[part], k[part], v[part], score)
            else:
                out[part] = self._go_on(layer, heads[part], span, mask, score)
        return out

    def _seen(self, window: int | None) -> Masks:
        window = None if window is None or window >= self._longest else window
        masks = self._masks.get(window)
        if masks is None:
            spans = [
                None if span.first == 0 and window is None else span.mask(window).repeat(self._share, 1)
                for span in self._spans
            ]
            masks = self._masks[window] = Masks([group.mask(window) for group in self._groups], spans)
        return masks

    def _decode(self, layer: int, q: Tensor, group: DecodeGroup, mask: Tensor, score: Score) -> Tensor:
        """q [b, H, d] → [b, H · d]: each group of query heads is a short query over its key head."""
        kv_heads, dim = self._store.kv_heads, self._store.head_dim
        keys, values = self._store.gather(layer, group.blocks, group.rows)
        folded = q.view(group.rows, kv_heads, self._share, dim)
        return score.attend(folded, keys, values, mask).reshape(group.rows, -1)

    def _begin(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        """The first tokens of a sequence, q [n, H, d] → [n, H · d]: what they see is all in this step."""
        keys = k.transpose(0, 1).repeat_interleave(self._share, 0).unsqueeze(0)
        values = v.transpose(0, 1).repeat_interleave(self._share, 0).unsqueeze(0)
        out = score.attend(q.transpose(0, 1).unsqueeze(0), keys, values, None)
        return out.squeeze(0).transpose(0, 1).reshape(len(q), -1)

    def _go_on(self, layer: int, q: Tensor, span: PrefillSpan, mask: Tensor, score: Score) -> Tensor:
        """A chunk over the paged keys, q [n, H, d] → [n, H · d]."""
        count, kv_heads, dim = len(q), self._store.kv_heads, self._store.head_dim
        keys, values = self._store.gather(layer, span.blocks, 1)
        folded = q.view(count, kv_heads, self._share, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        out = score.attend(folded, keys[:, :, : span.context], values[:, :, : span.context], mask)
        return out.view(kv_heads, self._share, count, dim).permute(2, 0, 1, 3).reshape(count, -1)


class Score(NamedTuple):
    """softmax(cap(scale · q · kᵀ) + mask) · v."""

    scale: float
    softcap: float | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [b, h, n, d], k and v [b, h, s, d], mask over [n, s] → [b, h, n, d]. No mask is the causal one, n = s."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        scores = ops.softcap(torch.matmul(q, k.transpose(-1, -2)) * self.scale, self.softcap)
        if mask is None:
            mask = _mask(torch.ones(scores.shape[-2:], dtype=torch.bool).tril_())
        return torch.matmul(torch.softmax(scores + mask, -1), v)


def _mask(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


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
        tables = torch.from_numpy(step.tables[members, :width].reshape(-1))
        whole = len(members) == len(step.positions)
        at = None if whole else torch.from_numpy(members)
        groups.append(DecodeGroup(at, len(members), tables, lengths[members], width * block_size))
    return groups


def _prefill_spans(step: StepInput, block_size: int) -> list[PrefillSpan]:
    spans, at = [], step.decodes
    for index in range(step.decodes, len(step.request_ids)):
        first, count = int(step.starts[index]), int(step.counts[index])
        blocks = torch.from_numpy(step.tables[index, : -(-(first + count) // block_size)].copy())
        spans.append(PrefillSpan(at, at + count, first, blocks))
        at += count
    return spans
