"""A model's geometry from the metadata of a GGUF file.

Layer: model algorithm. Torch-free. Keys as llama.cpp's converter writes them; what it leaves out for a family is what
llama.cpp itself assumes there. Biases are told from the tensors, as no key does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dataplane.errors import CheckpointError
from dataplane.models.families import GGUF, family_of
from dataplane.models.gguf_file import GGUFFile
from dataplane.models.shape import ModelShape, RopeScaling, need

ROPE_DIVISORS, ROPE_SHORT, ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = frozenset({ROPE_DIVISORS, ROPE_SHORT, ROPE_LONG})
ALTERNATION: Mapping[str, int] = MappingProxyType({"gemma2": 2, "gemma3": 6})
SCALED_BY_WIDTH: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})
"""Layers of the 27B models, whose attention scale is 1 / √(hidden / heads); that of the others is 1 / √head_dim."""
ENDS_OF_TURN = frozenset({"<end_of_turn>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"})
"""Control tokens that end an answer even where the file names another end of text."""
CONTROL = 3


class _Meta:
    """The file's keys, those of its architecture by their last part."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.all = file, file.metadata
        self.architecture = str(need(self.all, "general.architecture", file.path))

    def need(self, key: str) -> Any:
        return need(self.all, f"{self.architecture}.{key}", self.file.path)

    def get(self, key: str, otherwise: Any = None) -> Any:
        return self.all.get(f"{self.architecture}.{key}", otherwise)


def gguf_shape(file: GGUFFile) -> ModelShape:
    """The geometry of `file`. Raises CheckpointError naming what is missing or not supported."""
    meta = _Meta(file)
    family = family_of(meta.architecture, GGUF)
    hidden, heads, layers = (int(meta.need(key)) for key in ("embedding_length", "attention.head_count", "block_count"))
    head_dim = int(meta.get("attention.key_length", hidden // heads))
    if int(meta.get("attention.value_length", head_dim)) != head_dim:
        raise CheckpointError(f"{file.path.name}: keys and values of different sizes are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path.name} lacks the tensor token_embd.weight")
    turned = int(meta.get("rope.dimension_count", head_dim))
    local = meta.get("rope.freq_base_swa", 1e4) if family == "gemma3" else None
    return ModelShape(
        architecture=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(meta.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(meta.need("feed_forward_length")),
        vocab=embedding.shape[0],
        context=int(meta.need("context_length")),
        rms_eps=float(meta.need(f"attention.layer_norm_{'' if family == 'phi' else 'rms_'}epsilon")),
        rope_theta=float(meta.get("rope.freq_base", 1e6 if family == "gemma3" else 1e4)),
        rope_scaling=_scaling(meta),
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=end_ids(file.metadata),
        rotary_dim=None if turned == head_dim else turned,
        local_rope_theta=None if local is None else float(local),
        windows=_windows(meta, family, layers),
        attention_scale=(hidden / heads) ** -0.5 if SCALED_BY_WIDTH.get(family) == layers else None,
        attention_softcap=_cap(meta, family, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(meta, family, "final_logit_softcapping", 30.0),
        attention_bias=_has(file, "attn_q.bias", "attn_qkv.bias"),
        output_bias=_has(file, "attn_output.bias"),
        mlp_bias=_has(file, "ffn_down.bias"),
        mlp_matrices=2 if family == "phi" else 3,
    )


def end_ids(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a sequence: those the file names, and control tokens that end a turn."""
    named = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = {int(token) for token in named if token is not None}
    kinds, tokens = meta.get("tokenizer.ggml.token_type") or (), meta.get("tokenizer.ggml.tokens") or ()
    found.update(
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in ENDS_OF_TURN
    )
    return tuple(sorted(found))


def _has(file: GGUFFile, *names: str) -> bool:
    return any(f"blk.0.{name}" in file.tensors for name in names)


def _cap(meta: _Meta, family: str, key: str, usual: float) -> float | None:
    cap = meta.get(key, usual if family == "gemma2" else None)
    return None if cap is None or family not in ALTERNATION else float(cap)


def _windows(meta: _Meta, family: str, layers: int) -> tuple[int | None, ...]:
    size = meta.get("attention.sliding_window", 4096 if family == "gemma2" else None)
    if not size or family in ("gemma", "phi", "qwen2", "qwen3"):
        return ()
    pattern = meta.get("attention.sliding_window_pattern", ALTERNATION.get(family, 0))
    if isinstance(pattern, list):
        return tuple(int(size) if local else None for local in pattern)
    every = int(pattern)
    return tuple(int(size) if not every or (layer + 1) % every else None for layer in range(min(layers, 2**16)))


def _scaling(meta: _Meta) -> RopeScaling | None:
    file = meta.file
    original = int(meta.get("rope.scaling.original_context_length", meta.need("context_length")))
    if ROPE_LONG in file.tensors or ROPE_SHORT in file.tensors:
        return RopeScaling(
            "longrope",
            original_context=original,
            attention_factor=float(meta.get("rope.scaling.attn_factor", 1.0)),
            short_factors=_factors(file, ROPE_SHORT),
            long_factors=_factors(file, ROPE_LONG),
        )
    if ROPE_DIVISORS in file.tensors:
        return RopeScaling("divided", original_context=original, long_factors=_factors(file, ROPE_DIVISORS))
    kind = str(meta.get("rope.scaling.type", "none"))
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{file.path.name}: rope scaling {kind} without its factors is not supported; linear and yarn are"
        )
    factor = float(meta.need("rope.scaling.factor"))
    if kind == "linear":
        return RopeScaling(kind, factor, original_context=original)
    attention = float(meta.get("rope.scaling.attn_factor", 1.0)) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return RopeScaling(
        kind,
        factor,
        original_context=original,
        beta_fast=float(meta.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(meta.get("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=attention,
    )


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path.name} lacks {name}")
    return tuple(float(value) for value in file.read(name).reshape(-1))
