"""A checkpoint's weights in the forms that CPU kernels multiply with, packed matrix by matrix.

Layer: kernel and runtime. It walks a model that has no memory for its weights: each of its parameters is read, packed
and forgotten when a recorder asks for it, so that of the checkpoint's floats no more than one matrix is held at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dataplane.errors import CheckpointError
from dataplane.kernels.cpu.packing import pack_blocks, pack_float32, pack_int4, pack_int8
from dataplane.kernels.packed import BLOCK, Format, Packed
from dataplane.kernels.program import Floats
from dataplane.models.loader import read
from dataplane.models.registry import Model
from dataplane.models.rope import RotaryEmbedding
from dataplane.models.shape import ModelShape
from dataplane.models.sources import Source
from dataplane.models.weight_format import WeightFormat, packed_format


class CpuWeights:
    """What the parameters of `model`, made by `outline`, hold in `source`, which stays open while they are asked for.

    Raises CheckpointError for a weight that cannot be packed as asked.
    """

    def __init__(self, model: Model, source: Source, shape: ModelShape, positions: int, weights: WeightFormat) -> None:
        self._source, self._weights = source, weights
        self._names = _names(model)
        self._matrices: dict[Tensor, Packed] = {}
        self._floats: dict[Tensor, Floats] = _tables(model, shape, positions)
        self.nbytes = 0

    def matrix(self, parameter: Tensor) -> Packed:
        """A matrix that is multiplied with or looked up in; the same object whenever it is asked for again."""
        if parameter not in self._matrices:
            names = self._names[parameter]
            try:
                packed = self._packed(names)
            except ValueError as error:
                raise CheckpointError(f"{' with '.join(names)}: {error}") from error
            self._matrices[parameter] = packed
            self.nbytes += packed.nbytes
        return self._matrices[parameter]

    def floats(self, tensor: Tensor) -> Floats:
        """A norm's weight, a bias or a rotary table in float32."""
        if tensor not in self._floats:
            values = self._read(self._names[tensor])
            self._floats[tensor] = values
            self.nbytes += values.nbytes
        return self._floats[tensor]

    def _packed(self, names: list[str]) -> Packed:
        if self._weights is WeightFormat.BLOCKS:
            parts = [blocks for name in names if (blocks := self._source.blocks(name)) is not None]
            if len(parts) == len(names):
                return pack_blocks(parts)
        values = self._read(names)
        match packed_format(self._weights, names[0]):
            case Format.INT8:
                return pack_int8(values)
            case Format.UINT4:
                # The kernels hold scale and minimum of each block anyhow: larger groups would save nothing.
                return pack_int4(values, BLOCK)
            case Format.FLOAT32:
                return pack_float32(values)

    def _read(self, names: list[str]) -> Floats:
        """The weights `names` below each other."""
        parts = [read(self._source, name).to(torch.float32).numpy() for name in names]
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _names(model: Model) -> dict[Tensor, list[str]]:
    """For each parameter of the model the checkpoint's tensors that fill it, from its first row to its last."""
    found: dict[Tensor, list[tuple[int, str]]] = {}
    for name, place in model.weights().items():
        # A place is a parameter, or a view of some of its rows.
        parameter = place if place._base is None else place._base
        found.setdefault(parameter, []).append((int(place.storage_offset()), name))
    return {parameter: [name for _, name in sorted(parts)] for parameter, parts in found.items()}


def _tables(model: Model, shape: ModelShape, positions: int) -> dict[Tensor, Floats]:
    """The rotary tables that the model would have if it had memory for them."""
    assert isinstance(model, nn.Module)
    found: dict[Tensor, Floats] = {}
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            made = RotaryEmbedding(shape, positions, local=module.local)
            found |= {module.cos: made.cos.numpy(), module.sin: made.sin.numpy()}
    return found
