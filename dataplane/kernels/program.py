"""A model's step as plain data: what is computed on which columns, in order, with nothing left to decide.

Layer: kernel. A `Program` is recorded once from a model's own `forward` (`runtime.cpu_capture`) and run many times with
other contents (`kernels.cpu`); it refers to constants by value and to a step by nothing but the inputs below. It knows
neither requests nor how it is executed.

Every value is a float32 matrix of n rows, the same n throughout one run. A value's columns lie in the `arena`, which
is `width` floats a row; values that are never needed together may share columns of it. Inputs of a run, all for n rows:
`ids` [n] int64 for `Embed`, `positions` [n] int64 for `Rotate`, the paged KV and its tables for `Attend`, and for
`Take` the matrix it takes rows of and `rows` [n] int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataplane.kernels.packed import Packed

Floats = NDArray[np.float32]


class Columns(NamedTuple):
    """A value or a range of one: `width` columns of each row of the buffer that begins at arena column `buffer` and is
    `stride` columns wide; the range begins at its column `at`.

    Row r of the value begins at float `buffer · n_max + r · stride + at` of an arena made for n_max rows.
    """

    buffer: int
    stride: int
    at: int
    width: int


@dataclass(frozen=True, slots=True)
class Embed:
    """out[r] = table[ids[r]]."""

    out: Columns
    table: Packed


@dataclass(frozen=True, slots=True)
class Take:
    """out[r] = source[rows[r]], the source a matrix given to the run."""

    out: Columns


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x · Wᵀ + b, W [out.width, x.width]. With `out` None the result is the run's output [n, W.rows]."""

    out: Columns | None
    x: Columns
    weight: Packed
    bias: Floats | None


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y."""

    out: Columns
    x: Columns
    y: Columns


@dataclass(frozen=True, slots=True)
class Scale:
    """out = x · factor."""

    out: Columns
    x: Columns
    factor: float


@dataclass(frozen=True, slots=True)
class Softcap:
    """out = cap · tanh(x / cap). With `out` None, of the run's output in place."""

    out: Columns | None
    x: Columns | None
    cap: float


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = x · w / sqrt(mean(x²) + ε) over each group of w's length."""

    out: Columns
    x: Columns
    weight: Floats
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """out = (x − mean) / sqrt(var + ε) · w + b."""

    out: Columns
    x: Columns
    weight: Floats
    bias: Floats
    eps: float


@dataclass(frozen=True, slots=True)
class Rotate:
    """The first `cos.shape[1]` columns of each head turned by the row's position, as `ops.rotate` does.

    cos and sin are [positions, r] with equal halves, as `ops.turn` takes them.
    """

    out: Columns
    x: Columns
    cos: Floats
    sin: Floats
    head_dim: int


@dataclass(frozen=True, slots=True)
class SiluMul:
    """out = silu(g) · u for x = g ‖ u."""

    out: Columns
    x: Columns


@dataclass(frozen=True, slots=True)
class GeluTanhMul:
    """out = gelu_tanh(g) · u for x = g ‖ u."""

    out: Columns
    x: Columns


@dataclass(frozen=True, slots=True)
class GeluTanh:
    """out = gelu_tanh(x)."""

    out: Columns
    x: Columns


@dataclass(frozen=True, slots=True)
class Attend:
    """Store k and v at the step's slots of `layer`, then attend, as `ops.Attention.run` says."""

    out: Columns
    q: Columns
    k: Columns
    v: Columns
    layer: int
    scale: float
    window: int | None
    softcap: float | None


Operation = (
    Embed
    | Take
    | Linear
    | Add
    | Scale
    | Softcap
    | RmsNorm
    | LayerNorm
    | Rotate
    | SiluMul
    | GeluTanhMul
    | GeluTanh
    | Attend
)


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in order. `out` is where the result lies, or None when the last operation writes the run's output,
    whose width is `out_width`."""

    operations: tuple[Operation, ...]
    width: int
    out: Columns | None
    out_width: int
