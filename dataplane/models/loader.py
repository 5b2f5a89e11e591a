"""Fills a model from a checkpoint: GGUF, or safetensors with or without a shard index.

Layer: model algorithm. Every tensor the model needs must be there with its exact shape, and none may be left
over: a checkpoint that does not fit is refused before anything is served. It never guesses.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from dataplane.errors import CheckpointError
from dataplane.models.registry import Model, build
from dataplane.models.shape import ModelShape
from dataplane.models.sources import Source, open_source

NAMED_AT_MOST = 4


def load_model(path: Path, shape: ModelShape, *, positions: int, dtype: torch.dtype, device: torch.device) -> Model:
    """The network of `path`, weights in `dtype` on `device`, ready for inference.

    Raises CheckpointError naming the tensors that are missing, left over, mis-shaped or hold what is no number.
    """
    with ExitStack() as stack:
        source = open_source(path, shape, stack)
        outline(source, shape, positions, path.name)
        model = _build(shape, positions, dtype, device)
        for key, place in model.weights().items():
            place.copy_(read(source, key))
    model.eval()
    return model


def outline(source: Source, shape: ModelShape, positions: int, name: str) -> Model:
    """The network without memory for its weights. Raises CheckpointError unless `source` matches it one to one."""
    found = source.shapes()
    if shape.layers > len(found):
        raise CheckpointError(f"{name} claims {shape.layers} layers and holds {len(found)} tensors")
    model = _build(shape, positions, torch.float32, torch.device("meta"))
    places = model.weights()
    missing, extra = sorted(places.keys() - found.keys()), sorted(found.keys() - places.keys())
    if missing:
        raise CheckpointError(f"{name} lacks {_some(missing)}")
    if extra:
        raise CheckpointError(f"{name} holds tensors this architecture does not have: {_some(extra)}")
    for key, place in places.items():
        if found[key] != tuple(place.shape):
            raise CheckpointError(f"{name}: {key} has the shape {found[key]}, expected {tuple(place.shape)}")
    return model


def read(source: Source, key: str) -> Tensor:
    """One weight of `source`. Raises CheckpointError where it holds what is no number."""
    values = source.read(key)
    # One pass and no mask: a sum is finite where all that is summed is, unless it overflows.
    if not torch.isfinite(values.sum(dtype=torch.float64)) and not torch.isfinite(values).all():
        raise CheckpointError(f"{key} holds a number that is not finite")
    return values


def _build(shape: ModelShape, positions: int, dtype: torch.dtype, device: torch.device) -> Model:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build(shape, positions)
    finally:
        torch.set_default_dtype(before)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED_AT_MOST])
    return shown if len(names) <= NAMED_AT_MOST else f"{shown} and {len(names) - NAMED_AT_MOST} more"
