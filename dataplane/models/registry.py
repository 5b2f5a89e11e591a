"""Which class runs which family.

Layer: model algorithm. One entry per family of `dataplane.models.families`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn

from dataplane.kernels.ops import Attention
from dataplane.models.families import family_of
from dataplane.models.gemma import Gemma, Gemma2, Gemma3
from dataplane.models.llama import Llama, Phi3, Qwen3
from dataplane.models.phi import Phi
from dataplane.models.shape import ModelShape


class Model(Protocol):
    """What the runtime and the loader need of a network."""

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions [T] → hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] → logits [R, vocab]."""

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint tensor name → the part of the model that it fills."""

    def eval(self) -> nn.Module:
        """Switch off what only training needs."""


FAMILIES: Mapping[str, Callable[[ModelShape, int], Model]] = MappingProxyType(
    {
        "llama": Llama,
        "mistral": Llama,
        "qwen2": Llama,
        "qwen3": Qwen3,
        "gemma": Gemma,
        "gemma2": Gemma2,
        "gemma3": Gemma3,
        "phi": Phi,
        "phi3": Phi3,
    }
)


def build(shape: ModelShape, positions: int) -> Model:
    """An uninitialised model for `shape` with rotary tables for `positions`. Raises CheckpointError if unknown."""
    family_of(shape.architecture, {name: name for name in FAMILIES})
    return FAMILIES[shape.architecture](shape, positions)
