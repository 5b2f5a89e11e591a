"""How a step is run and in which numbers a model's weights are kept: what was asked for, made definite.

Layer: service. Torch-free. It asks whether the CPU's kernels can be had and what a checkpoint holds; it loads nothing.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gguf.constants import GGMLQuantizationType

from dataplane.errors import ConfigError
from dataplane.kernels.cpu import build, packing
from dataplane.kernels.cpu.gguf_blocks import FOUR_BITS
from dataplane.kernels.packed import BLOCK, Format
from dataplane.models.gguf_file import FLOAT_KINDS, GGUFFile, TensorInfo
from dataplane.models.gguf_names import hugging_face_name
from dataplane.models.shape import ModelShape
from dataplane.models.weight_format import WeightFormat, holds_blocks, packed_format

AUTO = "auto"
STACKS = ((r"[qkv]_proj", "qkv_proj"), (r"(gate|up)_proj", "gate_up_proj"))
"""Checkpoint matrices that lie in one of the model's."""
WITH_MINIMA = frozenset(GGMLQuantizationType[name] for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
"""Block types whose numbers are scale · q + minimum with a minimum of their own."""


class ForwardKind(enum.StrEnum):
    EAGER = "eager"
    """Torch, operation by operation, in float32."""
    CAPTURED = "captured"
    """Recorded once and run by kernels that are compiled for this machine."""


class Execution(NamedTuple):
    forward: ForwardKind
    weights: WeightFormat


def choose(path: Path, shape: ModelShape, forward: str = AUTO, weights: str = AUTO) -> Execution:
    """`auto` is captured where the kernels can be had, and eager elsewhere. Captured keeps the blocks of a quantised
    file; all other weights are float32 unless others are asked for.

    Raises ConfigError for what cannot be, with the reason.
    """
    for option, value, kind in (("forward", forward, ForwardKind), ("weights", weights, WeightFormat)):
        if value != AUTO and value not in list(kind):
            raise ConfigError(f"{option} must be one of {AUTO}, {', '.join(kind)}, got {value!r}")
    plain = weights in (AUTO, WeightFormat.FLOAT32)
    eager = Execution(ForwardKind.EAGER, WeightFormat.FLOAT32)
    if forward == ForwardKind.EAGER:
        if not plain:
            raise ConfigError(f"forward=eager multiplies in float32 only; weights={weights} needs forward=captured")
        return eager
    refusal = build.offer()
    if refusal is not None:
        if forward == AUTO and plain:
            return eager
        asked = f"forward={forward}" if forward != AUTO else f"weights={weights}"
        raise ConfigError(f"{asked} cannot work here: {refusal}")
    if weights == AUTO:
        chosen = WeightFormat.BLOCKS if holds_blocks(path) else WeightFormat.FLOAT32
        return Execution(ForwardKind.CAPTURED, chosen)
    if weights == WeightFormat.BLOCKS and not holds_blocks(path):
        raise ConfigError(f"weights=blocks keeps the blocks of a quantised GGUF file, and {path.name} holds none")
    if weights in (WeightFormat.INT8, WeightFormat.INT4):
        _require_whole_blocks(shape, weights)
    return Execution(ForwardKind.CAPTURED, WeightFormat(weights))


def weight_bytes(path: Path, shape: ModelShape, execution: Execution) -> int:
    """Bytes that the model's matrices take; norms, biases and tables are not counted."""
    if execution.forward is ForwardKind.EAGER:
        return shape.weight_bytes
    blocks = execution.weights is WeightFormat.BLOCKS
    matrices = _stored(path, shape) if blocks else _computed(shape, execution.weights)
    return sum(packing.nbytes(matrix.format, matrix.rows, matrix.columns, minima=matrix.minima) for matrix in matrices)


class Matrix(NamedTuple):
    format: Format
    rows: int
    columns: int
    minima: bool | None = None
    """Whether an INT8 matrix has any; None follows the format."""


def _computed(shape: ModelShape, weights: WeightFormat) -> Iterator[Matrix]:
    q, kv, inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    for _ in range(1 if shape.tied_embeddings else 2):
        yield Matrix(packed_format(weights, "lm_head.weight"), shape.vocab, shape.hidden)
    for _ in range(shape.layers):
        yield Matrix(packed_format(weights, "self_attn.q_proj.weight"), q + 2 * kv, shape.hidden)
        yield Matrix(packed_format(weights, "self_attn.o_proj.weight"), shape.hidden, q)
        yield Matrix(packed_format(weights, "mlp.up_proj.weight"), (shape.mlp_matrices - 1) * inner, shape.hidden)
        yield Matrix(packed_format(weights, "mlp.down_proj.weight"), shape.hidden, inner)


def _stored(path: Path, shape: ModelShape) -> Iterator[Matrix]:
    """The matrices of a GGUF file in the formats of their blocks."""
    stacks: dict[str, list[TensorInfo]] = {}
    for raw, info in GGUFFile.open(path).tensors.items():
        if len(info.shape) == 2:
            name = hugging_face_name(raw, shape.architecture)
            for pattern, stack in STACKS:
                name = re.sub(pattern, stack, name)
            stacks.setdefault(name, []).append(info)
    for parts in stacks.values():
        kinds, rows, columns = {part.kind for part in parts}, sum(part.shape[0] for part in parts), parts[0].shape[1]
        if kinds & FLOAT_KINDS:
            yield Matrix(Format.FLOAT32, rows, columns)
        elif kinds <= FOUR_BITS:
            yield Matrix(Format.UINT4, rows, columns)
        else:
            yield Matrix(Format.INT8, rows, columns, minima=bool(kinds & WITH_MINIMA))


def _require_whole_blocks(shape: ModelShape, weights: str) -> None:
    sizes = {"hidden": shape.hidden, "heads": shape.heads * shape.head_dim, "intermediate": shape.intermediate}
    for name, size in sizes.items():
        if size % BLOCK:
            raise ConfigError(f"weights={weights} needs sizes that {BLOCK} divides; this model's {name} is {size}")
