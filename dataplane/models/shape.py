"""The geometry of a model, read from its files.

Layer: model algorithm. Torch-free: configuration, KV accounting and the cost of a step need the numbers
without the weights. `hf_config` and `gguf_config` read it; they read metadata only, and of the tensors none but the
rotary factors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.errors import CheckpointError
from dataplane.models.gguf_file import GGUFFile

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was trained on.

    `kind` is `linear` (Chen et al. 2023), `dynamic` (NTK-aware, as transformers has it), `yarn` (Peng et al. 2023),
    `llama3` (Llama 3.1 report, appendix), `longrope` (Ding et al. 2024) or `divided` (a divisor for each pair that
    the checkpoint brings, `long_factors`).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """Tokens the model was trained on before it was stretched."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn's bounds are rounded to whole pairs."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """Divisors of each pair's frequency: of sequences up to `original_context`, and of longer ones."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder-only transformer is made of; every count is exact, every size in elements."""

    architecture: str
    """The family, a name of `dataplane.models.families`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rms_eps: float
    """ε of every norm, of LayerNorms too."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rotary_dim: int | None = None
    """Columns of a head that turn with the position; None is all of them."""
    local_rope_theta: float | None = None
    """The base of layers that have a window, unscaled; None where it is that of all layers (Gemma 3 has its own)."""
    windows: tuple[int | None, ...] = ()
    """For each layer the nearest keys a query sees, its own among them, None for all; () where no layer has one."""
    attention_scale: float | None = None
    """Factor of the attention scores; None is 1 / √head_dim."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_bias: bool = False
    """Whether queries, keys and values have a bias; `output_bias` and `mlp_bias` likewise for their products."""
    output_bias: bool = False
    mlp_bias: bool = False
    mlp_matrices: int = 3
    """3 where the MLP has a gate, 2 where it has none."""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")
        wrong = [f"{name} {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if not wrong and self.heads % self.kv_heads:
            wrong = [f"{self.heads} heads over {self.kv_heads} key heads"]
        if not wrong and self.head_dim % 2:
            wrong = [f"the odd head size {self.head_dim}"]
        if not wrong and not (0 < self.rms_eps < 1 and 1 < self.rope_theta < math.inf):
            wrong = [f"rms_eps {self.rms_eps}, rope_theta {self.rope_theta}"]
        wrong = wrong or self._attention_faults()
        if wrong:
            raise CheckpointError(f"the model's metadata cannot be: {', '.join(wrong)}")

    def _attention_faults(self) -> list[str]:
        wrong = []
        if self.turned < 2 or self.turned > self.head_dim or self.turned % 2:
            wrong.append(f"{self.turned} of {self.head_dim} columns of a head that turn")
        sizes = [size for size in self.windows if size is not None]
        if self.windows and (len(self.windows) != self.layers or min(sizes, default=1) < 1):
            wrong.append(f"the windows {self.windows} of {self.layers} layers")
        if self.local_rope_theta is not None and not 1 < self.local_rope_theta < math.inf:
            wrong.append(f"local_rope_theta {self.local_rope_theta}")
        for name in ("attention_scale", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                wrong.append(f"{name} {value}")
        return wrong or self._scaling_faults()

    def _scaling_faults(self) -> list[str]:
        scaling, pairs = self.rope_scaling, self.turned // 2
        if scaling is None:
            return []
        wrong = [
            f"rope {name} {getattr(scaling, name)}"
            for name in ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "original_context")
            if not 0 < getattr(scaling, name) < math.inf
        ]
        for name in ("short_factors", "long_factors"):
            factors = getattr(scaling, name)
            if factors and (len(factors) != pairs or not all(0 < factor < math.inf for factor in factors)):
                wrong.append(f"{len(factors)} rope {name} for {pairs} pairs, the least {min(factors)}")
        if scaling.kind == "dynamic" and pairs < 2:
            wrong.append("dynamic rope scaling of a single pair")
        if scaling.kind == "llama3" and scaling.low_freq_factor == scaling.high_freq_factor:
            wrong.append(f"rope high_freq_factor {scaling.high_freq_factor}")
        return wrong

    @property
    def turned(self) -> int:
        """Columns of a head that turn with the position."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """The nearest keys a query of `layer` sees; None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def longest(self) -> int:
        """The most tokens a sequence may have: dynamic scaling stretches the context to its factor."""
        scaling = self.rope_scaling
        stretched = scaling is not None and scaling.kind == "dynamic"
        return int(self.context * scaling.factor) if scaling and stretched else self.context

    @property
    def kv_bytes_per_token(self) -> int:
        """2 · L · H_k · d_h · bytes (DOMAIN 3.1)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * FLOAT_BYTES

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers that every token multiplies with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        copies = 1 if self.tied_embeddings else 2
        return FLOAT_BYTES * (self.layer_parameters + copies * self.head_parameters)

    def step_flops(self, tokens: int, pairs: int, sampled: int) -> float:
        """FLOPs of a step: 2·P per token, 4·L·H·d_h per (query, key) pair, 2·d·V per sampled row (DOMAIN 3.2)."""
        attention = 4.0 * self.layers * self.heads * self.head_dim * pairs
        return 2.0 * self.layer_parameters * tokens + attention + 2.0 * self.head_parameters * sampled

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """From a GGUF file or a folder with `config.json`. Raises CheckpointError naming what is missing."""
        from dataplane.models.gguf_config import gguf_shape
        from dataplane.models.hf_config import hf_shape

        try:
            return hf_shape(path) if path.is_dir() else gguf_shape(GGUFFile.open(path))
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise CheckpointError(f"the metadata of {path.name} is damaged: {error}") from error


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a sequence, from config.json and generation_config.json together."""
    found: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        value = read_json(path).get("eos_token_id") if path.exists() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def need(source: dict[str, Any], key: str, path: Path) -> Any:
    """source[key]. Raises CheckpointError where it is missing or null."""
    if source.get(key) is None:
        raise CheckpointError(f"{path.name} lacks {key}")
    return source[key]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value
