"""Records a model's step as `Program`s: its own `forward` and `logits`, called once with symbols.

Layer: kernel and runtime. It knows the operations and where their results may lie, not the models: what a decoder
does is read from its calls. It computes nothing and holds no weights; those come from `Constants`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from dataplane.kernels.packed import Packed
from dataplane.kernels.program import (
    Add,
    Attend,
    Columns,
    Embed,
    Floats,
    GeluTanh,
    GeluTanhMul,
    LayerNorm,
    Linear,
    Operation,
    Program,
    RmsNorm,
    Rotate,
    Scale,
    SiluMul,
    Softcap,
    Take,
)
from dataplane.kernels.recording import Symbol
from dataplane.models.registry import Model

ALIGNMENT = 16
"""Floats of a cache line: where buffers begin in the arena."""


class Constants(Protocol):
    """What a model's parameters and tables hold, in the forms that programs refer to."""

    def matrix(self, parameter: Tensor) -> Packed:
        """A matrix that is multiplied with or looked up in; the same object whenever it is asked for again."""

    def floats(self, tensor: Tensor) -> Floats:
        """A norm's weight, a bias or a table."""


class Value(Symbol):
    """Columns of a buffer that is not placed yet: `columns.buffer` is its number."""

    __slots__ = ("columns",)

    def __init__(self, recorder: Recorder, columns: Columns) -> None:
        super().__init__(recorder)
        self.columns = columns

    @property
    def width(self) -> int:
        return self.columns.width


class RecordedTurn(NamedTuple):
    """The tables that `rotate` turns by."""

    cos: Floats
    sin: Floats


class Recorder:
    """Notes operations in order. Its methods are those of `kernels.ops` and `Attention`, with values for matrices."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._operations: list[Operation] = []
        self._widths: list[int] = []

    def take(self, width: int) -> Value:
        """Rows of the matrix that is given to the run."""
        out = self._new(width)
        self._operations.append(Take(out.columns))
        return out

    def embed(self, ids: Symbol, table: Tensor) -> Value:
        packed = self._constants.matrix(table)
        out = self._new(packed.columns)
        self._operations.append(Embed(out.columns, packed))
        return out

    def linear(self, x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
        packed = self._constants.matrix(weight)
        assert packed.columns == x.width, f"a product of {packed.columns} columns with {x.width}"
        out = self._new(packed.rows)
        shift = None if bias is None else self._constants.floats(bias)
        self._operations.append(Linear(out.columns, x.columns, packed, shift))
        return out

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        assert sum(sizes) == x.width, f"{x.width} columns split into {list(sizes)}"
        parts, at = [], x.columns.at
        for size in sizes:
            parts.append(Value(self, x.columns._replace(at=at, width=size)))
            at += size
        return parts

    def add(self, x: Value, y: Value) -> Value:
        assert x.width == y.width, f"{x.width} columns added to {y.width}"
        out = self._new(x.width)
        self._operations.append(Add(out.columns, x.columns, y.columns))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        out = self._new(x.width)
        self._operations.append(Scale(out.columns, x.columns, factor))
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        out = self._new(x.width)
        self._operations.append(Softcap(out.columns, x.columns, cap))
        return out

    def rms_norm(self, x: Value, weight: Tensor, eps: float) -> Value:
        out, factors = self._new(x.width), self._constants.floats(weight)
        assert x.width % len(factors) == 0, f"{x.width} columns normed by {len(factors)}"
        self._operations.append(RmsNorm(out.columns, x.columns, factors, eps))
        return out

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor, eps: float) -> Value:
        out = self._new(x.width)
        factors, shift = self._constants.floats(weight), self._constants.floats(bias)
        self._operations.append(LayerNorm(out.columns, x.columns, factors, shift, eps))
        return out

    def turn(self, positions: Symbol, cos: Tensor, sin: Tensor) -> RecordedTurn:
        return RecordedTurn(self._constants.floats(cos), self._constants.floats(sin))

    def rotate(self, x: Value, by: RecordedTurn, head_dim: int) -> Value:
        assert x.width % head_dim == 0, f"{x.width} columns in heads of {head_dim}"
        out = self._new(x.width)
        self._operations.append(Rotate(out.columns, x.columns, by.cos, by.sin, head_dim))
        return out

    def silu_mul(self, gate_up: Value) -> Value:
        out = self._new(gate_up.width // 2)
        self._operations.append(SiluMul(out.columns, gate_up.columns))
        return out

    def gelu_tanh_mul(self, gate_up: Value) -> Value:
        out = self._new(gate_up.width // 2)
        self._operations.append(GeluTanhMul(out.columns, gate_up.columns))
        return out

    def gelu_tanh(self, x: Value) -> Value:
        out = self._new(x.width)
        self._operations.append(GeluTanh(out.columns, x.columns))
        return out

    def run(
        self,
        layer: int,
        q: Value,
        k: Value,
        v: Value,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Attention, as `ops.Attention.run` says."""
        out = self._new(q.width)
        self._operations.append(Attend(out.columns, q.columns, k.columns, v.columns, layer, scale, window, softcap))
        return out

    def program(self, result: Value) -> Program:
        """What was noted, with `result` lying in the arena at the end."""
        whole = Columns(result.columns.buffer, result.columns.stride, 0, result.columns.stride)
        assert result.columns == whole, "a result is a whole buffer"
        starts, width = self._place(result.columns.buffer)
        placed = tuple(_placed(operation, starts) for operation in self._operations)
        return Program(placed, width, whole._replace(buffer=starts[whole.buffer]), whole.width)

    def output(self, result: Value) -> Program:
        """What was noted, with `result` written to the run's output: it is that of a product, capped or not."""
        *rest, last = self._operations
        if isinstance(last, Softcap) and rest and isinstance(rest[-1], Linear) and last.x == rest[-1].out:
            self._operations = [*rest[:-1], replace(rest[-1], out=None), replace(last, out=None, x=None)]
        else:
            assert isinstance(last, Linear) and last.out == result.columns, "a head ends in a product, capped or not"
            self._operations = [*rest, replace(last, out=None)]
        starts, width = self._place(None)
        placed = tuple(_placed(operation, starts) for operation in self._operations)
        return Program(placed, width, None, result.width)

    def _new(self, width: int) -> Value:
        self._widths.append(width)
        return Value(self, Columns(len(self._widths) - 1, width, 0, width))

    def _place(self, kept: int | None) -> tuple[dict[int, int], int]:
        """Where in the arena each buffer begins, and the arena's width. `kept` is needed to the end.

        Buffers are placed in the order in which they come to be, each at the first columns that no buffer holds
        which is written or read from then to its own last use.
        """
        last: dict[int, int] = {}
        for index, operation in enumerate(self._operations):
            for _, columns in _columns_of(operation):
                last[columns.buffer] = index
        if kept is not None:
            last[kept] = len(self._operations)
        starts: dict[int, int] = {}
        living: list[tuple[int, int, int]] = []
        width = 0
        for index, operation in enumerate(self._operations):
            living = [held for held in living if last[held[2]] >= index]
            for name, columns in _columns_of(operation):
                if name == "out" and columns.buffer not in starts:
                    size = -(-columns.stride // ALIGNMENT) * ALIGNMENT
                    at = 0
                    for begin, end, _ in sorted(living):
                        if begin - at >= size:
                            break
                        at = max(at, end)
                    starts[columns.buffer] = at
                    living.append((at, at + size, columns.buffer))
                    width = max(width, at + size)
        return starts, width


class Captured(NamedTuple):
    """A model as two programs: `body` makes hidden states of a step's tokens, `head` logits of rows of them."""

    body: Program
    head: Program


def capture(model: Model, hidden: int, constants: Constants) -> Captured:
    """Record `model`, whose hidden states are `hidden` wide."""
    body = Recorder(constants)
    # The inputs are named by nothing: `Embed` and `Rotate` know what they take.
    token_ids, positions = Symbol(body), Symbol(body)
    states = model(*cast(Any, (token_ids, positions, body)))
    head = Recorder(constants)
    logits = model.logits(cast(Any, head.take(hidden)))
    return Captured(body.program(cast(Any, states)), head.output(cast(Any, logits)))


def _columns_of(operation: Operation) -> list[tuple[str, Columns]]:
    """Every value that `operation` reads or writes, by the name of its field."""
    values = [(field.name, getattr(operation, field.name)) for field in fields(operation)]
    return [(name, value) for name, value in values if isinstance(value, Columns)]


def _placed(operation: Operation, starts: dict[int, int]) -> Operation:
    moved = {name: columns._replace(buffer=starts[columns.buffer]) for name, columns in _columns_of(operation)}
    return replace(cast(Any, operation), **moved)  # type: ignore[no-any-return]
