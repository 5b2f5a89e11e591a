"""In which numbers an engine keeps a checkpoint's matrices.

Layer: model algorithm. Torch-free: it reads a checkpoint's directory, never its weights.
"""

from __future__ import annotations

import enum
from pathlib import Path

from dataplane.kernels.packed import Format
from dataplane.models.gguf_file import FLOAT_KINDS, GGUFFile

EIGHT_BITS = ("embed_tokens.", "lm_head.", "q_proj.", "k_proj.", "v_proj.", "mlp.down_proj.", "mlp.fc2.")
"""Matrices of which int4 makes int8."""


class WeightFormat(enum.StrEnum):
    """Norms, biases and rotary tables are float32 in each of them, activations too."""

    FLOAT32 = "float32"
    BLOCKS = "blocks"
    """The quantised blocks of a GGUF file as they are; what the file holds in floats is float32."""
    INT8 = "int8"
    INT4 = "int4"
    """Four bits with scale and minimum of each 32 columns; in eight the embedding, the head, queries, keys and values,
    and what leads out of an MLP, which four harm most."""


def packed_format(weights: WeightFormat, name: str) -> Format:
    """How the matrix that the checkpoint's tensor `name` is part of is packed; not for `BLOCKS`, which follows it."""
    match weights:
        case WeightFormat.INT8:
            return Format.INT8
        case WeightFormat.INT4:
            return Format.INT8 if any(part in name for part in EIGHT_BITS) else Format.UINT4
        case _:
            return Format.FLOAT32


def holds_blocks(path: Path) -> bool:
    """Whether the checkpoint at `path` is quantised: whether any of its matrices lies in blocks."""
    if path.is_dir():
        return False
    return any(info.kind not in FLOAT_KINDS for info in GGUFFile.open(path).tensors.values())
