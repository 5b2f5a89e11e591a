"""The paged backend attends to what a plain attention over whole sequences attends to."""

from __future__ import annotations

import random

import pytest
import torch

from dataplane.memory.kv_store import KVStore
from dataplane.models.shape import ModelShape
from dataplane.protocol import SamplingParams
from dataplane.runtime.attention import TorchAttention
from dataplane.runtime.input_batch import InputBatch
from dataplane.scheduling.plan import NewRequest, Plan

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


def shape() -> ModelShape:
    return ModelShape("llama", 3, 48, HEADS, KV_HEADS, DIM, 64, 32, 2048, 1e-5, 1e4, None, True, (2,))


SEEN: tuple[tuple[int | None, float | None, float], ...] = ((None, None, DIM**-0.5), (5, None, 0.3), (33, 2.0, 0.5))
"""(window, soft-cap, scale) of layers that one step runs after each other."""


def whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, seen: tuple[int | None, float | None, float]
) -> torch.Tensor:
    """Textbook attention: q [n, H, d] at positions from `start` over k and v [S, H_k, d] → [n, H · d]."""
    window, cap, scale = seen
    share = HEADS // KV_HEADS
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("nhd,shd->hns", q, k) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    keys, queries = torch.arange(k.shape[0]), torch.arange(start, start + q.shape[0])[:, None]
    visible = (keys <= queries) & (keys > queries - (window or k.shape[0]))
    return torch.einsum("hns,shd->nhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v).flatten(1)


@pytest.mark.parametrize("seed", range(12))
def test_mixed_steps_equal_whole_attention(seed: int) -> None:
    """Random decodes (short and very long) and chunks, histories in scattered blocks, foreign garbage around."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    store = KVStore(shape(), 600, BLOCK)
    for tensor in (*store.keys, *store.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 50)
    free = list(range(1, 600))
    rng.shuffle(free)
    requests, tokens = [], {}
    for index in range(rng.randint(1, 7)):
        start = rng.choice([0, 0, 3, 4, 17, 130, 400])
        count = rng.choice([1, 1, 2, 5, 9])
        total = start + count
        blocks = [free.pop() for _ in range(-(-total // BLOCK))]
        requests.append(NewRequest(str(index), [1] * total, total, SamplingParams(), 0, (), blocks, start))
        tokens[str(index)] = count
    plan = Plan(1, tokens, frozenset(), new=tuple(requests))
    batch = InputBatch(16, 1024, BLOCK)
    batch.update(plan)
    step = batch.gather(plan)
    attention = TorchAttention(store, HEADS).plan(step)
    for layer, seen in enumerate(SEEN):
        history = {
            new.request_id: (
                torch.randn(new.computed + tokens[new.request_id], KV_HEADS, DIM, generator=generator),
                torch.randn(new.computed + tokens[new.request_id], KV_HEADS, DIM, generator=generator),
            )
            for new in requests
        }
        for new in requests:
            slots = torch.tensor([new.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(new.computed)])
            if new.computed:
                k, v = history[new.request_id]
                store.write(layer, slots, k[: new.computed], v[: new.computed])
        q = torch.randn(len(step.positions), HEADS, DIM, generator=generator)
        fresh = [[history[name][part][-tokens[name] :] for name in step.request_ids] for part in (0, 1)]
        flat = [tensor.flatten(1) for tensor in (q, torch.cat(fresh[0]), torch.cat(fresh[1]))]
        window, cap, scale = seen
        out = attention.run(layer, *flat, scale=scale, window=window, softcap=cap)
        at = 0
        for name in step.request_ids:
            count = tokens[name]
            k, v = history[name]
            expected = whole(q[at : at + count], k, v, k.shape[0] - count, seen)
            torch.testing.assert_close(out[at : at + count], expected, rtol=1e-4, atol=1e-4)
            at += count


def test_fresh_kv_memory_is_zero_and_counted() -> None:
    store = KVStore(shape(), 10, BLOCK)
    assert store.nbytes == 10 * BLOCK * shape().kv_bytes_per_token
    assert not store.keys[0].any()
