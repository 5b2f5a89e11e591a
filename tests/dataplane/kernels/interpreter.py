"""Runs a `Program` operation by operation in numpy float64: slow, and written to be believed.

It keeps every value where the program says that it lies, in an arena filled with NaN, so that a program which gives
two living values the same columns cannot come out right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane.kernels import program as p
from dataplane.kernels.packed import Packed
from dataplane.kernels.program import Columns, Program

Wide = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass
class Paged:
    """Keys and values, [layers][H_k, blocks · block_size, d], and where a step's tokens read and write them.

    `tables` [R, n], `starts` and `counts` [R] are the step's requests in the order of its tokens, `slots` [T].
    """

    keys: list[NDArray[np.float32]]
    values: list[NDArray[np.float32]]
    block_size: int
    slots: Ints
    tables: Ints
    starts: Ints
    counts: Ints


class Interpreter:
    """`unpack` gives a packed matrix in floats."""

    def __init__(self, program: Program, unpack: Callable[[Packed], NDArray[np.float32]], rows: int) -> None:
        self.program, self.rows = program, rows
        self.unpack = unpack
        self.arena = np.full(program.width * rows, np.nan)
        self.output = np.full((rows, program.out_width), np.nan)

    def body(self, ids: Ints, positions: Ints, paged: Paged) -> Wide:
        """Hidden states [n, width]."""
        self.n, self.ids, self.positions, self.paged = len(ids), ids, positions, paged
        for operation in self.program.operations:
            self._run(operation)
        assert self.program.out is not None
        return self._get(self.program.out).copy()

    def head(self, source: Wide, rows: Ints) -> Wide:
        """Logits [n, vocab] of `rows` of `source`."""
        self.n, self.source, self.taken = len(rows), source, rows
        for operation in self.program.operations:
            self._run(operation)
        return self.output[: self.n].copy()

    def _run(self, op: p.Operation) -> None:
        match op:
            case p.Embed():
                self._put(op.out, self.unpack(op.table)[self.ids])
            case p.Take():
                self._put(op.out, self.source[self.taken])
            case p.Linear():
                y = self._get(op.x) @ self.unpack(op.weight).T.astype(np.float64)
                self._put(op.out, y if op.bias is None else y + op.bias)
            case p.Add():
                self._put(op.out, self._get(op.x) + self._get(op.y))
            case p.Scale():
                self._put(op.out, self._get(op.x) * op.factor)
            case p.Softcap():
                x = self.output[: self.n] if op.x is None else self._get(op.x)
                self._put(op.out, op.cap * np.tanh(x / op.cap))
            case p.RmsNorm():
                x = self._get(op.x).reshape(self.n, -1, len(op.weight))
                y = x * op.weight / np.sqrt((x**2).mean(-1, keepdims=True) + op.eps)
                self._put(op.out, y.reshape(self.n, -1))
            case p.LayerNorm():
                x = self._get(op.x)
                x = x - x.mean(-1, keepdims=True)
                self._put(op.out, x / np.sqrt((x**2).mean(-1, keepdims=True) + op.eps) * op.weight + op.bias)
            case p.Rotate():
                self._put(op.out, self._rotated(op))
            case p.SiluMul():
                gate, up = np.split(self._get(op.x), 2, axis=1)
                self._put(op.out, gate / (1 + np.exp(-gate)) * up)
            case p.GeluTanhMul():
                gate, up = np.split(self._get(op.x), 2, axis=1)
                self._put(op.out, _gelu(gate) * up)
            case p.GeluTanh():
                self._put(op.out, _gelu(self._get(op.x)))
            case p.Attend():
                self._put(op.out, self._attended(op))

    def _rotated(self, op: p.Rotate) -> Wide:
        heads = self._get(op.x).reshape(self.n, -1, op.head_dim).copy()
        turned = op.cos.shape[1]
        half = turned // 2
        cos, sin = op.cos[self.positions][:, None, :half], op.sin[self.positions][:, None, :half]
        left, right = heads[..., :half].copy(), heads[..., half:turned].copy()
        heads[..., :half], heads[..., half:turned] = left * cos - right * sin, right * cos + left * sin
        return heads.reshape(self.n, -1)

    def _attended(self, op: p.Attend) -> Wide:
        paged = self.paged
        keys, values = paged.keys[op.layer], paged.values[op.layer]
        kv_heads, _, dim = keys.shape
        keys[:, paged.slots] = self._get(op.k).reshape(self.n, kv_heads, dim).swapaxes(0, 1)
        values[:, paged.slots] = self._get(op.v).reshape(self.n, kv_heads, dim).swapaxes(0, 1)
        q = self._get(op.q).reshape(self.n, -1, dim)
        share = q.shape[1] // kv_heads
        out = np.empty_like(q)
        token = 0
        for table, start, count in zip(paged.tables, paged.starts, paged.counts, strict=True):
            for position in range(start, start + count):
                first = 0 if op.window is None else max(0, position + 1 - op.window)
                seen = np.arange(first, position + 1)
                at = table[seen // paged.block_size] * paged.block_size + seen % paged.block_size
                for head in range(q.shape[1]):
                    scores = keys[head // share, at].astype(np.float64) @ q[token, head] * op.scale
                    if op.softcap is not None:
                        scores = op.softcap * np.tanh(scores / op.softcap)
                    mass = np.exp(scores - scores.max())
                    out[token, head] = mass / mass.sum() @ values[head // share, at].astype(np.float64)
                token += 1
        return out.reshape(self.n, -1)

    def _view(self, columns: Columns) -> Wide:
        start = columns.buffer * self.rows
        buffer = self.arena[start : start + self.rows * columns.stride].reshape(self.rows, columns.stride)
        return buffer[: self.n, columns.at : columns.at + columns.width]

    def _get(self, columns: Columns) -> Wide:
        found = self._view(columns)
        assert not np.isnan(found).any(), f"{columns} is read before it is written"
        return found

    def _put(self, columns: Columns | None, values: Wide) -> None:
        if columns is None:
            self.output[: self.n] = values
        else:
            self._view(columns)[:] = values


def _gelu(x: Wide) -> Wide:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
