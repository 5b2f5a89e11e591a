"""Fills a model from a checkpoint: GGUF, or safetensors with or without a shard index.

Layer: model algorithm. Every tensor the model needs must be there with its exact shape, and none may be left
over: a checkpoint that does not fit is refused before anything is served. It never guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dataplane.errors import CheckpointError
from dataplane.models.gguf_file import GGUFFile
from dataplane.models.registry import Model, build
from dataplane.models.rope import inverse_frequencies
from dataplane.models.shape import ModelShape, read_json

GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
NAMED_AT_MOST = 4


class Source(Protocol):
    """An open checkpoint, under Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the checkpoint and its shape."""

    def read(self, name: str) -> Tensor:
        """One weight, in the float type of the checkpoint or float32."""

    def rope_factors(self) -> Tensor | None:
        """Per-pair divisors of the rotary frequencies, where the checkpoint carries them."""


def load_model(path: Path, shape: ModelShape, *, positions: int, dtype: torch.dtype, device: torch.device) -> Model:
    """The network of `path`, weights in `dtype` on `device`, ready for inference.

    Raises CheckpointError naming the tensors that are missing, left over or mis-shaped.
    """
    with ExitStack() as stack:
        source = _open(path, shape, stack)
        _check(source.shapes(), shape, positions, path.name)
        model = _build(shape, positions, dtype, device)
        for key, place in model.weights().items():
            place.copy_(source.read(key))
        factors = source.rope_factors()
    if factors is not None:
        model.rotary.set_frequencies(inverse_frequencies(shape, factors))
    model.eval()
    return model


def _build(shape: ModelShape, positions: int, dtype: torch.dtype, device: torch.device) -> Model:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build(shape, positions)
    finally:
        torch.set_default_dtype(before)


def _check(found: dict[str, tuple[int, ...]], shape: ModelShape, positions: int, name: str) -> None:
    """The checkpoint's tensors and the model's match one to one, before any memory is taken for them."""
    if shape.layers > len(found):
        raise CheckpointError(f"{name} claims {shape.layers} layers and holds {len(found)} tensors")
    places = _build(shape, positions, torch.float32, torch.device("meta")).weights()
    missing, extra = sorted(places.keys() - found.keys()), sorted(found.keys() - places.keys())
    if missing:
        raise CheckpointError(f"{name} lacks {_some(missing)}")
    if extra:
        raise CheckpointError(f"{name} holds tensors this architecture does not have: {_some(extra)}")
    for key, place in places.items():
        if found[key] != tuple(place.shape):
            raise CheckpointError(f"{name}: {key} has the shape {found[key]}, expected {tuple(place.shape)}")


def _open(path: Path, shape: ModelShape, stack: ExitStack) -> Source:
    if path.is_dir():
        return SafetensorsSource(path, shape, stack)
    return GGUFSource(GGUFFile.open(path), shape)


class GGUFSource:
    """A GGUF file under Hugging Face names, dequantised to float32 tensor by tensor."""

    def __init__(self, file: GGUFFile, shape: ModelShape) -> None:
        self._file = file
        self._shape = shape
        self._names = {_hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.tensors[raw].shape for name, raw in self._names.items()}

    def read(self, name: str) -> Tensor:
        values = self._file.read(self._names[name])
        if name.endswith("q_proj.weight"):
            values = unpermute(values, self._shape.heads)
        elif name.endswith("k_proj.weight"):
            values = unpermute(values, self._shape.kv_heads)
        return torch.from_numpy(np.require(values, requirements="W"))

    def rope_factors(self) -> Tensor | None:
        return torch.from_numpy(self._file.read(ROPE_FACTORS).copy()) if ROPE_FACTORS in self._file.tensors else None


class SafetensorsSource:
    """A folder with `model.safetensors`, or with `model.safetensors.index.json` and its shards."""

    def __init__(self, folder: Path, shape: ModelShape, stack: ExitStack) -> None:
        self._files = {}
        for path in _shards(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {path.name}: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))
        if shape.tied_embeddings:
            self._files.pop("lm_head.weight", None)
        for name in [name for name in self._files if name.endswith("rotary_emb.inv_freq")]:
            del self._files[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def rope_factors(self) -> Tensor | None:
        return None


def unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k: its pairs are (2i, 2i+1), ours (i, i + d/2)."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    """A GGUF tensor's Hugging Face name; a name that has none stays, and is then reported as left over."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match is None:
        return GGUF_TOP.get(name, name)
    rest = GGUF_LAYER.get(match[2])
    return f"model.layers.{match[1]}.{rest}" if rest else name


def _shards(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        yield folder / "model.safetensors"
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index.name} has no weight_map")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index.name} names a shard outside its folder: {name}")
        yield folder / name


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED_AT_MOST])
    return shown if len(names) <= NAMED_AT_MOST else f"{shown} and {len(names) - NAMED_AT_MOST} more"
