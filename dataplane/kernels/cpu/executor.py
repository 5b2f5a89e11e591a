"""Runs programs on the CPU: a program is translated into C structs once, a run is one call without the GIL.

Layer: kernel. The C side trusts its caller, so whatever a run refers to is checked here first: that ids, positions,
rows, slots and block tables lie within what they index. It knows nothing of requests but their tables and lengths.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataplane.kernels import program as ir
from dataplane.kernels.cpu import layout
from dataplane.kernels.cpu.abi import KINDS, Columns, Inputs, Matrix, Operation
from dataplane.kernels.cpu.build import BuildError, library
from dataplane.kernels.packed import Packed

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class KV(NamedTuple):
    """The paged KV that `Attend` writes and reads: one array a layer, each [H_k, blocks, block_size · head_dim]."""

    keys: Sequence[Floats]
    values: Sequence[Floats]
    block_size: int


class Step(NamedTuple):
    """What one run of a program that attends is about: T tokens of R requests, as `StepInput` says, all of int64.

    ids, positions and slots are [T], starts and counts [R], tables [R, n]. Requests with one token come first.
    """

    ids: Ints
    positions: Ints
    slots: Ints
    tables: Ints
    starts: Ints
    counts: Ints


class StepError(ValueError):
    """A run refers to something that is not there; the message names what."""


class CpuExecutor:
    """Threads that run programs, one program at a time. `threads` of them compute, the caller's among them.

    Raises BuildError where there are no kernels. `tier` is the instruction set in use.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads cannot compute")
        functions, self.tier = library()
        sizes = (functions.tidegate_operation_bytes(), functions.tidegate_inputs_bytes())
        assert sizes == (ctypes.sizeof(Operation), ctypes.sizeof(Inputs)), "abi.py and abi.h differ"
        handle = functions.tidegate_executor(threads)
        if not handle:
            raise BuildError(f"the system refused {threads} threads or their memory")
        self.threads = threads
        self._functions, self._handle = functions, handle
        self.close = weakref.finalize(self, functions.tidegate_free_executor, handle)
        """Ends the threads; nothing runs afterwards."""

    def load(self, program: ir.Program, rows: int, kv: KV | None = None) -> LoadedProgram:
        """`program` made ready to run on up to `rows` rows at a time, attending over `kv`."""
        return LoadedProgram(self, program, rows, kv)

    def call(self, program: int, inputs: ctypes.Structure) -> None:
        """Run a loaded program. Raises MemoryError."""
        if not self.close.alive:
            raise RuntimeError("the executor was closed")
        if self._functions.tidegate_run(self._handle, program, ctypes.byref(inputs)):
            raise MemoryError("the kernels had no memory for their activations")


@dataclass(frozen=True, slots=True)
class _Limits:
    """What inputs of a program may refer to: ids and positions below these; None where it has no such input."""

    ids: int | None
    positions: int | None
    take_width: int | None

    @staticmethod
    def of(program: ir.Program) -> _Limits:
        ids = [op.table.rows for op in program.operations if isinstance(op, ir.Embed)]
        positions = [len(op.cos) for op in program.operations if isinstance(op, ir.Rotate)]
        widths = [op.out.width for op in program.operations if isinstance(op, ir.Take)]
        return _Limits(min(ids, default=None), min(positions, default=None), max(widths, default=None))


class LoadedProgram:
    """A program with its arena of `rows` rows. Not for two threads at once."""

    def __init__(self, executor: CpuExecutor, program: ir.Program, rows: int, kv: KV | None) -> None:
        self._executor, self._program, self._rows, self._kv = executor, program, rows, kv
        self._limits = _Limits.of(program)
        self._arena = layout.aligned(program.width * rows * 4).view(np.float32)
        self._kept: list[Any] = []
        operations = (Operation * len(program.operations))(*map(self._translate, program.operations))
        functions = executor._functions
        self._handle = functions.tidegate_load(operations, len(operations))
        if not self._handle:
            raise MemoryError("the kernels had no memory for a program")
        weakref.finalize(self, functions.tidegate_free_program, self._handle)
        self._inputs = self._constant_inputs()

    @property
    def arena_bytes(self) -> int:
        """Memory of values; of the operating system's once that many rows have been run."""
        return self._arena.nbytes

    def run(self, step: Step) -> None:
        """Compute the program for a step. Raises StepError if it refers to what is not there."""
        n = len(step.ids)
        self._check_tokens(step, n)
        inputs = self._inputs
        inputs.n = n
        inputs.ids, inputs.positions = _address(step.ids, "ids"), _address(step.positions, "positions")
        if self._kv is not None:
            self._check_requests(step, n, self._kv)
            inputs.slots, inputs.tables = _address(step.slots, "slots"), _address(step.tables, "tables")
            inputs.starts, inputs.counts = _address(step.starts, "starts"), _address(step.counts, "counts")
            inputs.requests, inputs.table_width = step.tables.shape
        self._executor.call(self._handle, inputs)

    def result(self, n: int) -> Floats:
        """The first n rows of the program's result, [n, width], as a view that the next run changes."""
        out = self._program.out
        assert out is not None, "the program writes its result to the run's output"
        start = out.buffer * self._rows
        value = self._arena[start : start + n * out.stride].reshape(n, out.stride)
        return value[:, out.at : out.at + out.width]

    def take(self, source: Floats, rows: Ints, out: Floats) -> None:
        """Compute the program for `rows` [n] of source [any, width], whose rows may lie apart, into out [n, out_width].

        Raises StepError as `run`.
        """
        n, width = len(rows), self._limits.take_width
        self._check_count(n)
        if source.dtype != np.float32 or source.ndim != 2 or source.shape[1] != width or source.strides[1] != 4:
            raise StepError(f"rows are to be taken of a float32 matrix of {width} columns, not {_describe(source)}")
        if out.dtype != np.float32 or out.shape != (n, self._program.out_width) or not out.flags.c_contiguous:
            raise StepError(f"the output is a float32 matrix [{n}, {self._program.out_width}], not {_describe(out)}")
        _within(rows, len(source), "rows")
        inputs = self._inputs
        inputs.n = n
        inputs.source, inputs.source_stride = source.ctypes.data, source.strides[0] // 4
        inputs.rows, inputs.output = _address(rows, "rows"), out.ctypes.data
        self._executor.call(self._handle, inputs)

    def _constant_inputs(self) -> ctypes.Structure:
        inputs = Inputs(n_max=self._rows, arena=self._arena.ctypes.data, output_width=self._program.out_width)
        attends = [op for op in self._program.operations if isinstance(op, ir.Attend)]
        if not attends:
            return inputs
        kv = self._kv
        assert kv is not None, "a program that attends needs a KV"
        heads, blocks, size = kv.keys[0].shape
        dim = size // kv.block_size
        for pool in (*kv.keys, *kv.values):
            if pool.shape != kv.keys[0].shape or pool.dtype != np.float32 or not pool.flags.c_contiguous:
                raise ValueError(f"a layer's KV is {_describe(pool)}, not as the first")
        for op in attends:
            assert op.k.width == op.v.width == heads * dim and op.q.width % op.k.width == 0, (
                "heads differ from the KV's"
            )
            assert op.q.width == attends[0].q.width and op.layer < len(kv.keys), "layers differ"
        inputs.keys, inputs.values = self._addresses(kv.keys), self._addresses(kv.values)
        inputs.blocks, inputs.block_size, inputs.head_dim = blocks, kv.block_size, dim
        return inputs

    def _addresses(self, pools: Sequence[Floats]) -> int:
        table = np.array([pool.ctypes.data for pool in pools], dtype=np.uint64)
        self._kept.append((pools, table))
        return table.ctypes.data

    def _check_count(self, n: int) -> None:
        if not 0 < n <= self._rows:
            raise StepError(f"{n} rows do not fit a program of {self._rows}")

    def _check_tokens(self, step: Step, n: int) -> None:
        self._check_count(n)
        if len(step.positions) != n:
            raise StepError(f"{len(step.positions)} positions were given for {n} ids")
        if self._limits.ids is not None:
            _within(step.ids, self._limits.ids, "ids")
        if self._limits.positions is not None:
            _within(step.positions, self._limits.positions, "positions")

    def _check_requests(self, step: Step, n: int, kv: KV) -> None:
        blocks, requests = kv.keys[0].shape[1], len(step.counts)
        if len(step.slots) != n:
            raise StepError(f"{len(step.slots)} slots were given for {n} ids")
        if step.tables.ndim != 2 or len(step.tables) != requests or len(step.starts) != requests:
            raise StepError(f"{requests} counts, {len(step.starts)} starts and {len(step.tables)} tables do not agree")
        _within(step.slots, blocks * kv.block_size, "slots")
        _within(step.tables, blocks, "tables")
        room = step.tables.shape[1] * kv.block_size
        if int(step.counts.min()) < 1 or int(step.counts.sum()) != n:
            raise StepError(f"counts {_some(step.counts)} are not those of {n} tokens")
        ends = step.starts + step.counts
        if int(step.starts.min()) < 0 or int(ends.max()) > room:
            raise StepError(f"lengths {_some(ends)} do not lie in tables of {room} tokens")

    def _translate(self, operation: ir.Operation) -> ctypes.Structure:
        out = Operation(kind=KINDS[type(operation)])
        for field in fields(operation):
            value = getattr(operation, field.name)
            name = _FIELDS.get((type(operation), field.name), field.name)
            if field.name in ("out", "x") and value is None:
                width = self._program.out_width
                setattr(out, name, Columns(buffer=-1, stride=width, at=0, width=width))
            elif value is not None:
                setattr(out, name, self._encoded(value))
        match operation:
            case ir.RmsNorm() | ir.LayerNorm():
                out.size = len(operation.weight)
            case ir.Rotate():
                out.turned = operation.cos.shape[1]
        return out

    def _encoded(self, value: ir.Columns | Packed | Floats | float) -> Any:
        """A field's value as C has it. Arrays are kept for as long as the program is."""
        match value:
            case ir.Columns():
                return Columns(*value)
            case Packed():
                self._kept.append(value)
                addresses = (value.values.ctypes.data, value.scales.ctypes.data)
                return Matrix(value.format, value.rows, value.columns, layout.has_minima(value), *addresses)
            case np.ndarray():
                array = np.ascontiguousarray(value, dtype=np.float32)
                self._kept.append(array)
                return array.ctypes.data
            case _:
                return value


_FIELDS: dict[tuple[type, str], str] = {
    (ir.Embed, "table"): "weight",
    (ir.Linear, "bias"): "a",
    (ir.Scale, "factor"): "factor",
    (ir.RmsNorm, "weight"): "a",
    (ir.RmsNorm, "eps"): "factor",
    (ir.LayerNorm, "weight"): "a",
    (ir.LayerNorm, "bias"): "b",
    (ir.LayerNorm, "eps"): "factor",
    (ir.Rotate, "cos"): "a",
    (ir.Rotate, "sin"): "b",
    (ir.Rotate, "head_dim"): "size",
    (ir.Attend, "q"): "x",
    (ir.Attend, "k"): "y",
    (ir.Attend, "v"): "z",
    (ir.Attend, "scale"): "factor",
    (ir.Attend, "softcap"): "cap",
}
"""The C field of an operation's, where it has another name."""


def _address(array: Ints, name: str) -> int:
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise StepError(f"{name} are contiguous numbers of int64, not {_describe(array)}")
    return array.ctypes.data


def _within(array: Ints, end: int, name: str) -> None:
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= end:
        raise StepError(f"{name} hold {low if low < 0 else high}, which is not in 0…{end - 1}")


def _some(array: Ints) -> str:
    return ", ".join(map(str, array[:8].tolist())) + (", …" if len(array) > 8 else "")


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
