"""Which class runs which architecture.

Layer: model algorithm. One entry per architecture name as checkpoints spell it (GGUF `general.architecture`,
Hugging Face `model_type`); an unknown name is refused here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn

from dataplane.errors import CheckpointError
from dataplane.models.llama import Attention, Llama
from dataplane.models.rope import RotaryEmbedding
from dataplane.models.shape import ModelShape


class Model(Protocol):
    """What the runtime and the loader need of a network."""

    rotary: RotaryEmbedding

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions [T] → hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] → logits [R, vocab]."""

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint tensor name → the part of the model that it fills."""

    def eval(self) -> nn.Module:
        """Switch off what only training needs."""


ARCHITECTURES: Mapping[str, Callable[[ModelShape, int], Model]] = MappingProxyType({"llama": Llama})


def build(shape: ModelShape, positions: int) -> Model:
    """An uninitialised model for `shape` with rotary tables for `positions`. Raises CheckpointError if unknown."""
    model = ARCHITECTURES.get(shape.architecture)
    if model is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"the architecture {shape.architecture} is not supported; supported are: {known}")
    return model(shape, positions)
