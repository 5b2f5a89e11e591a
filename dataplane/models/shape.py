"""The geometry of a model, read from its files.

Layer: model algorithm. Torch-free: configuration, KV accounting and the cost of a step need the numbers
without the weights. It reads metadata only, never a tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dataplane.errors import CheckpointError
from dataplane.models.gguf_file import GGUFFile

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` is `linear` or `llama3` (Llama 3.1 report, appendix)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder-only transformer is made of; every count is exact, every size in elements."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")
        wrong = [f"{name} {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if not wrong and self.heads % self.kv_heads:
            wrong = [f"{self.heads} heads over {self.kv_heads} key heads"]
        if not wrong and self.head_dim % 2:
            wrong = [f"the odd head size {self.head_dim}"]
        if not wrong and not (0 < self.rms_eps < 1 and 0 < self.rope_theta < math.inf):
            wrong = [f"rms_eps {self.rms_eps}, rope_theta {self.rope_theta}"]
        if wrong:
            raise CheckpointError(f"the model's metadata cannot be: {', '.join(wrong)}")

    @property
    def kv_bytes_per_token(self) -> int:
        """2 · L · H_k · d_h · bytes (DOMAIN 3.1)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * FLOAT_BYTES

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers that every token multiplies with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

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

    def step_bytes(self, context_tokens: int, sampled: int) -> float:
        """Bytes a step must read: the layers' weights, the LM head if a row is sampled, the KV of its contexts."""
        head = self.head_parameters if sampled else 0
        return FLOAT_BYTES * (self.layer_parameters + head) + self.kv_bytes_per_token * float(context_tokens)

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a GGUF file or a folder with `config.json`. Raises CheckpointError naming what is missing."""
        try:
            return cls.from_hf(path) if path.is_dir() else cls.from_gguf(GGUFFile.open(path))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(f"the metadata of {path.name} is damaged: {error}") from error

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        meta = file.metadata
        arch = str(_need(meta, "general.architecture", file.path))

        def need(key: str) -> Any:
            return _need(meta, f"{arch}.{key}", file.path)

        hidden, heads = int(need("embedding_length")), int(need("attention.head_count"))
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{file.path.name} lacks the tensor token_embd.weight")
        eos = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return cls(
            architecture=arch,
            layers=int(need("block_count")),
            hidden=hidden,
            heads=heads,
            kv_heads=int(meta.get(f"{arch}.attention.head_count_kv", heads)),
            head_dim=int(meta.get(f"{arch}.attention.key_length", hidden // heads)),
            intermediate=int(need("feed_forward_length")),
            vocab=embedding.shape[0],
            context=int(need("context_length")),
            rms_eps=float(need("attention.layer_norm_rms_epsilon")),
            rope_theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
            rope_scaling=_gguf_scaling(meta, arch, file.path),
            tied_embeddings="output.weight" not in file.tensors,
            eos_token_ids=tuple(sorted({int(token) for token in eos if token is not None})),
        )

    @classmethod
    def from_hf(cls, folder: Path) -> Self:
        config = read_json(folder / "config.json")
        hidden, heads = int(_need(config, "hidden_size", folder)), int(_need(config, "num_attention_heads", folder))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            architecture=str(_need(config, "model_type", folder)),
            layers=int(_need(config, "num_hidden_layers", folder)),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(_need(config, "intermediate_size", folder)),
            vocab=int(_need(config, "vocab_size", folder)),
            context=int(_need(config, "max_position_embeddings", folder)),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=_hf_scaling(rope, folder),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=eos_ids(folder),
        )


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a sequence, from config.json and generation_config.json together."""
    found: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        value = read_json(path).get("eos_token_id") if path.exists() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def _need(source: dict[str, Any], key: str, path: Path) -> Any:
    if source.get(key) is None:
        raise CheckpointError(f"{path.name} lacks {key}")
    return source[key]


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _gguf_scaling(meta: dict[str, Any], arch: str, path: Path) -> RopeScaling | None:
    kind = str(meta.get(f"{arch}.rope.scaling.type", "none"))
    if kind == "none":
        return None
    if kind != "linear":
        raise CheckpointError(f"{path.name}: rope scaling {kind} is not supported; linear and llama3 are")
    return RopeScaling("linear", float(_need(meta, f"{arch}.rope.scaling.factor", path)))


def _hf_scaling(rope: dict[str, Any], folder: Path) -> RopeScaling | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(_need(rope, "factor", folder)))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(_need(rope, "factor", folder)),
            low_freq_factor=float(_need(rope, "low_freq_factor", folder)),
            high_freq_factor=float(_need(rope, "high_freq_factor", folder)),
            original_context=int(_need(rope, "original_max_position_embeddings", folder)),
        )
    raise CheckpointError(f"{folder.name}: rope scaling {kind} is not supported; linear and llama3 are")
