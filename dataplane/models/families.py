"""Which model families this engine runs, and how checkpoints spell them.

Layer: model algorithm. Torch-free. A name that is not here is refused before anything else of a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dataplane.errors import CheckpointError

HUGGING_FACE: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3")}
    | {"gemma3_text": "gemma3"}
)
"""`model_type` in config.json → family."""
GGUF: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")} | {"phi2": "phi"}
)
"""`general.architecture` → family. llama.cpp writes Mistral as llama."""
UNIT_OFFSET = frozenset({"gemma", "gemma2", "gemma3"})
"""Families whose norms multiply by 1 + w where Hugging Face's files hold w; GGUF files hold 1 + w."""


def family_of(name: str, spellings: Mapping[str, str]) -> str:
    """The family that a checkpoint calls `name`. Raises CheckpointError with the names that are known."""
    family = spellings.get(name)
    if family is None:
        raise CheckpointError(
            f"the architecture {name} is not supported; supported are: {', '.join(sorted(spellings))}"
        )
    return family
