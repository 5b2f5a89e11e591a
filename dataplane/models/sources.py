"""Open checkpoints, GGUF and safetensors, both under Hugging Face's tensor names.

Layer: model algorithm. A source says which tensors there are and reads one at a time; where the two formats hold the
same weight differently (llama.cpp's rotary order, Gemma's norms), what `read` gives is what the model multiplies with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dataplane.errors import CheckpointError
from dataplane.models.families import UNIT_OFFSET
from dataplane.models.gguf_config import ROPE_TENSORS
from dataplane.models.gguf_file import FLOAT_KINDS, GGUFFile
from dataplane.models.gguf_names import hugging_face_name
from dataplane.models.shape import ModelShape, read_json

Number = TypeVar("Number", np.float32, np.uint8)
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
FUSED_QKV = "self_attn.qkv_proj."
PARTS = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")


class Blocks(NamedTuple):
    """Rows of quantised blocks, [rows, bytes of a row], and what kind they are."""

    rows: NDArray[np.uint8]
    kind: GGMLQuantizationType


class Source(Protocol):
    """An open checkpoint, under Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the checkpoint and its shape."""

    def read(self, name: str) -> Tensor:
        """One weight, in the float type of the checkpoint or float32."""

    def blocks(self, name: str) -> Blocks | None:
        """One weight's quantised blocks as they lie in the checkpoint; None where it is stored in floats."""


def open_source(path: Path, shape: ModelShape, stack: ExitStack) -> Source:
    """The checkpoint at `path`, open until `stack` closes. Raises CheckpointError when it cannot be."""
    return SafetensorsSource(path, shape, stack) if path.is_dir() else GGUFSource(GGUFFile.open(path), shape)


class GGUFSource:
    """A GGUF file, dequantised to float32 tensor by tensor or given as it is."""

    def __init__(self, file: GGUFFile, shape: ModelShape) -> None:
        self._file = file
        self._shape = shape
        self._rows: dict[str, tuple[str, slice]] = {}
        for raw in file.tensors.keys() - ROPE_TENSORS:
            self._rows |= self._named(raw, hugging_face_name(raw, shape.architecture))

    def _named(self, raw: str, name: str) -> dict[str, tuple[str, slice]]:
        """Which rows of the tensor `raw` are the weight `name`: all, or where Phi's q, k and v are fused, a part."""
        if self._shape.architecture != "phi" or FUSED_QKV not in name:
            return {name: (raw, slice(None))}
        sizes = [heads * self._shape.head_dim for heads in (self._shape.heads, *2 * [self._shape.kv_heads])]
        ends = np.cumsum(sizes).tolist()
        return {
            name.replace(FUSED_QKV, part): (raw, slice(end - size, end))
            for part, size, end in zip(PARTS, sizes, ends, strict=True)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, (raw, rows) in self._rows.items():
            first, *others = self._file.tensors[raw].shape
            found[name] = (len(range(first)[rows]), *others)
        return found

    def read(self, name: str) -> Tensor:
        raw, rows = self._rows[name]
        values = self._in_order(name, self._file.read(raw)[rows])
        return torch.from_numpy(np.require(values, requirements="W"))

    def blocks(self, name: str) -> Blocks | None:
        raw, rows = self._rows[name]
        kind = self._file.tensors[raw].kind
        return None if kind in FLOAT_KINDS else Blocks(self._in_order(name, self._file.raw(raw)[rows]), kind)

    def _in_order(self, name: str, rows: NDArray[Number]) -> NDArray[Number]:
        """A weight's rows in Hugging Face's order. Blocks never reach over rows, so that they move with them."""
        if self._shape.architecture == "llama":
            if ".q_proj." in name:
                return unpermute(rows, self._shape.heads)
            if ".k_proj." in name:
                return unpermute(rows, self._shape.kv_heads)
        return rows


class SafetensorsSource:
    """A folder with `model.safetensors`, or with `model.safetensors.index.json` and its shards."""

    def __init__(self, folder: Path, shape: ModelShape, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        self._offset = 1.0 if shape.architecture in UNIT_OFFSET else 0.0
        for path in _shards(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {path.name}: {error}") from error
            self._take(path.name, opened)
        if shape.tied_embeddings:
            self._files.pop("lm_head.weight", None)
        for name in [name for name in self._files if name.endswith("rotary_emb.inv_freq")]:
            del self._files[name]

    def _take(self, file_name: str, opened: Any) -> None:
        for name in opened.keys():  # noqa: SIM118 - the file is no mapping
            if name in self._files:
                raise CheckpointError(f"{file_name} holds {name}, which another shard holds too")
            kind = opened.get_slice(name).get_dtype()
            if kind not in FLOATS:
                known = ", ".join(sorted(FLOATS))
                raise CheckpointError(f"{file_name}: {name} is of type {kind}; supported types are {known}")
            self._files[name] = opened

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.float() + self._offset if self._offset and name.endswith("norm.weight") else tensor

    def blocks(self, name: str) -> Blocks | None:
        return None


def unpermute(values: NDArray[Number], heads: int) -> NDArray[Number]:
    """Undo llama.cpp's row order of q and k, weights and biases: its pairs are (2i, 2i+1), ours (i, i + d/2)."""
    return values.reshape(heads, -1, 2, values[0].size).swapaxes(1, 2).reshape(values.shape)


def _shards(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        yield folder / "model.safetensors"
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index.name} has no weight_map")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index.name} names a shard outside its folder: {name}")
        yield folder / name
