"""Programs of one operation, run on numbers that a test gives."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataplane.kernels import program as ir
from dataplane.kernels.cpu.executor import KV, CpuExecutor, LoadedProgram, Step
from dataplane.kernels.packed import Packed

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def noise(*size: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def whole(buffer: int, width: int) -> ir.Columns:
    """A value that has columns of the arena of its own."""
    return ir.Columns(buffer, width, 0, width)


def no_step(n: int, positions: Ints | None = None, ids: Ints | None = None) -> Step:
    """A step of n tokens without KV."""
    zeros = np.zeros(n, dtype=np.int64)
    empty = np.zeros((0, 0), dtype=np.int64)
    return Step(zeros if ids is None else ids, zeros if positions is None else positions, zeros, empty, zeros, zeros)


class Arena:
    """A program whose inputs a test writes into the arena before it runs."""

    def __init__(
        self,
        executor: CpuExecutor,
        operations: list[ir.Operation],
        width: int,
        out: ir.Columns,
        rows: int,
        kv: KV | None,
    ) -> None:
        self.rows = rows
        self.loaded = executor.load(ir.Program(tuple(operations), width, out, 0), rows, kv)

    def view(self, value: ir.Columns, n: int) -> Floats:
        start = value.buffer * self.rows
        return self.loaded._arena[start : start + n * value.stride].reshape(n, value.stride)[
            :, value.at : value.at + value.width
        ]


def apply(
    executor: CpuExecutor,
    operation: ir.Operation,
    inputs: dict[ir.Columns, Floats],
    step: Step,
    *,
    kv: KV | None = None,
    spare: int = 3,
) -> Floats:
    """What one operation makes of inputs at their columns, with rows to spare, in an arena full of NaN."""
    values = [*inputs, operation.out]
    assert all(value is not None for value in values)
    width = max(value.buffer + value.stride for value in values if value is not None)
    n = len(step.ids)
    assert operation.out is not None
    arena = Arena(executor, [operation], width, operation.out, n + spare, kv)
    arena.loaded._arena[:] = np.nan
    for at, value in inputs.items():
        arena.view(at, n)[...] = value
    arena.loaded.run(step)
    return arena.loaded.result(n).copy()


def head(executor: CpuExecutor, weight: Packed, bias: Floats | None = None, rows: int = 300) -> LoadedProgram:
    """A program that takes rows and multiplies them with a matrix."""
    x = whole(0, weight.columns)
    return executor.load(
        ir.Program((ir.Take(x), ir.Linear(None, x, weight, bias)), weight.columns, None, weight.rows), rows
    )


def multiply(loaded: LoadedProgram, x: Floats) -> Floats:
    out = np.full((len(x), loaded._program.out_width), np.nan, dtype=np.float32)
    loaded.take(x, np.arange(len(x)), out)
    return out
