"""Paged attention against the torch backend, and against itself in other batches, chunks and threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dataplane.kernels import program as ir
from dataplane.kernels.cpu.executor import KV, CpuExecutor, Step
from tests.dataplane.kernels.cpu.conftest import Executors
from tests.dataplane.kernels.cpu.programs import Floats, apply, noise, whole

Request = tuple[int, int]
"""(tokens before the step, tokens in it)"""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block: int
    window: int | None = None
    softcap: float | None = None


SHAPES = (
    Shape(9, 3, 64, 16),
    Shape(9, 3, 64, 16, window=50),
    Shape(4, 2, 16, 4, softcap=3.0),
    Shape(6, 6, 8, 8),
    Shape(5, 1, 24, 16, window=7, softcap=1.5),
    Shape(4, 2, 80, 32),
    Shape(2, 1, 22, 16),
    Shape(2, 1, 256, 16, window=600),
    Shape(3, 3, 96, 5),
)
SEQUENCES: tuple[tuple[Request, ...], ...] = (
    ((0, 1),),
    ((1100, 1),),
    ((0, 130),),
    ((515, 1), (3, 1), (63, 1), (64, 1), (700, 70), (0, 33), (30, 2)),
)


class History:
    """Sequences of random keys and values in scattered blocks of a pool that is NaN wherever nobody wrote."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.shape = shape
        needed = [-(-length // shape.block) for length in lengths]
        order = rng.permutation(np.arange(1, sum(needed) + 5))
        self.tables, at = [], 0
        for count in needed:
            self.tables.append(order[at : at + count].astype(np.int64))
            at += count
        width = shape.kv_heads * shape.dim
        self.q = [noise(length, shape.heads * shape.dim, seed=seed + i) * 2 for i, length in enumerate(lengths)]
        self.k = [noise(length, width, seed=seed + 100 + i) for i, length in enumerate(lengths)]
        self.v = [noise(length, width, seed=seed + 200 + i) for i, length in enumerate(lengths)]
        self.size = (shape.kv_heads, len(order) + 1, shape.block * shape.dim)

    def attend(self, executor: CpuExecutor, requests: dict[int, Request]) -> dict[int, Floats]:
        """What the step's tokens of sequences attend to, their tokens before it being in the pool."""
        shape = self.shape
        keys, values = (np.full(self.size, np.nan, dtype=np.float32) for _ in range(2))
        for index, (start, _) in requests.items():
            slots = self.slots(index, 0, start)
            for pool, source in ((keys, self.k), (values, self.v)):
                flat = pool.reshape(shape.kv_heads, -1, shape.dim)
                flat[:, slots] = source[index][:start].reshape(start, shape.kv_heads, shape.dim).transpose(1, 0, 2)
        order = sorted(requests, key=lambda index: requests[index][1] > 1)
        spans = [(index, *requests[index]) for index in order]
        tables = np.zeros((len(order), max(len(self.tables[i]) for i in order)), dtype=np.int64)
        for row, index in enumerate(order):
            tables[row, : len(self.tables[index])] = self.tables[index]
        starts, counts = (np.array(part, dtype=np.int64) for part in zip(*(requests[i] for i in order), strict=True))
        flat_slots = np.concatenate([self.slots(*span) for span in spans])
        zeros = np.zeros(len(flat_slots), dtype=np.int64)
        step = Step(zeros, zeros, flat_slots, tables, starts, counts)
        wide, narrow = shape.heads * shape.dim, shape.kv_heads * shape.dim
        q, k, v, out = whole(0, wide), whole(wide, narrow), whole(wide + narrow, narrow), whole(wide + 2 * narrow, wide)
        inputs = {
            at: np.concatenate([source[i][start : start + count] for i, start, count in spans])
            for at, source in ((q, self.q), (k, self.k), (v, self.v))
        }
        operation = ir.Attend(out, q, k, v, 1, shape.dim**-0.5, shape.window, shape.softcap)
        kv = KV([np.zeros_like(keys), keys], [np.zeros_like(values), values], shape.block)
        found = apply(executor, operation, inputs, step, kv=kv)
        assert not kv.keys[0].any(), "another layer was written"
        return dict(zip(order, np.split(found, np.cumsum(counts)[:-1]), strict=True))

    def slots(self, index: int, start: int, count: int) -> np.ndarray:
        at = np.arange(start, start + count)
        slots: np.ndarray = self.tables[index][at // self.shape.block] * self.shape.block + at % self.shape.block
        return slots

    def expected(self, index: int, start: int, count: int) -> torch.Tensor:
        """Textbook attention over the whole sequence in float64."""
        shape = self.shape
        end = start + count
        q = torch.from_numpy(self.q[index][start:end]).double().view(count, shape.heads, shape.dim)
        k, v = (
            torch.from_numpy(source[index][:end]).double().view(end, shape.kv_heads, shape.dim)
            .repeat_interleave(shape.heads // shape.kv_heads, 1)
            for source in (self.k, self.v)
        )  # fmt: skip
        scores = torch.einsum("nhd,shd->hns", q, k) * shape.dim**-0.5
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        keys, queries = torch.arange(end), torch.arange(start, end)[:, None]
        visible = (keys <= queries) & (keys > queries - (shape.window or end))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hns,shd->nhd", weights, v).flatten(1).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("requests", SEQUENCES, ids=str)
def test_it_is_textbook_attention(executor: CpuExecutor, shape: Shape, requests: tuple[Request, ...]) -> None:
    history = History(shape, [start + count for start, count in requests])
    for index, found in history.attend(executor, dict(enumerate(requests))).items():
        expected = history.expected(index, *requests[index])
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone_batched_and_on_other_threads_it_is_the_same_to_the_bit(executors: Executors, shape: Shape) -> None:
    requests = SEQUENCES[-1]
    history = History(shape, [start + count for start, count in requests])
    together = history.attend(executors("scalar", 3), dict(enumerate(requests)))
    for index, request in enumerate(requests):
        alone = history.attend(executors("scalar", 1), {index: request})
        np.testing.assert_array_equal(alone[index], together[index])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_decodes_equal_the_whole_to_the_bit(executor: CpuExecutor, shape: Shape) -> None:
    length = 600
    history = History(shape, [length])
    whole_run = history.attend(executor, {0: (0, length)})[0]
    for start, count in ((0, 1), (0, 77), (77, 200), (277, 1), (511, 2), (513, 86), (599, 1)):
        part = history.attend(executor, {0: (start, count)})[0]
        np.testing.assert_array_equal(part, whole_run[start : start + count])


def test_it_stores_the_step_and_nothing_else(executor: CpuExecutor) -> None:
    shape = SHAPES[0]
    width = shape.kv_heads * shape.dim
    keys, values = (np.zeros((3, 4, 16 * 64), dtype=np.float32) for _ in range(2))
    wide = shape.heads * shape.dim
    q, k, v = whole(0, wide), whole(wide, width), whole(wide + width, width)
    inputs = {q: noise(2, wide), k: noise(2, width, seed=1), v: noise(2, width, seed=2)}
    zeros = np.zeros(2, dtype=np.int64)
    step = Step(
        zeros,
        zeros,
        np.array([35, 50], dtype=np.int64),
        np.array([[2], [3]], dtype=np.int64),
        np.array([3, 2], dtype=np.int64),
        np.array([1, 1], dtype=np.int64),
    )
    apply(executor, ir.Attend(q, q, k, v, 0, 1.0, None, None), inputs, step, kv=KV([keys], [values], 16))
    for pool, source in ((keys, inputs[k]), (values, inputs[v])):
        flat = pool.reshape(3, 64, 64)
        np.testing.assert_array_equal(flat[:, 35], source[0].reshape(3, 64))
        np.testing.assert_array_equal(flat[:, 50], source[1].reshape(3, 64))
        flat[:, [35, 50]] = 0
        assert not flat.any()
