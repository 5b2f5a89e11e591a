"""A model's geometry from Hugging Face's `config.json`.

Layer: model algorithm. Torch-free. It reads today's spelling (`rope_parameters`, `layer_types`) and that of older
checkpoints, fills in what a family's own defaults are, and refuses what this engine would compute otherwise than the
checkpoint says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dataplane.errors import CheckpointError
from dataplane.models.families import HUGGING_FACE, family_of
from dataplane.models.shape import ModelShape, RopeScaling, eos_ids, need, read_json

GELU_TANH = frozenset({"gelu_pytorch_tanh", "gelu_new", "gelu_fast"})
ACTIVATIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), frozenset({"silu", "swish"})),
        # Gemma's first files say gelu and mean its tanh approximation.
        **dict.fromkeys(("gemma", "gemma2", "gemma3"), GELU_TANH | {"gelu"}),
        "phi": GELU_TANH,
    }
)
UNTIED_BY_DEFAULT = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi", "phi3"})
HEAD_DIMS: Mapping[str, int] = MappingProxyType({"gemma": 256, "gemma2": 256, "gemma3": 256, "qwen3": 128})
"""Sizes of a head that a family's config may leave out; elsewhere it is hidden / heads."""
ALTERNATION: Mapping[str, int] = MappingProxyType({"gemma2": 2, "gemma3": 6})
"""Every so-many-th layer sees everything, the others have a window."""
PARTIAL: Mapping[str, float] = MappingProxyType({"phi": 0.5, "phi3": 1.0})
"""Families that turn a part of each head, and the part where the config does not say."""


def hf_shape(folder: Path) -> ModelShape:
    """The geometry of `folder`. Raises CheckpointError naming what is missing or not supported."""
    config = read_json(folder / "config.json")
    family = family_of(str(need(config, "model_type", folder)), HUGGING_FACE)
    _refuse_unsupported(config, family, folder)
    hidden, heads = int(need(config, "hidden_size", folder)), int(need(config, "num_attention_heads", folder))
    layers, context = (
        int(need(config, "num_hidden_layers", folder)),
        int(need(config, "max_position_embeddings", folder)),
    )
    head_dim = int(config.get("head_dim") or HEAD_DIMS.get(family) or hidden // heads)
    rope, local_theta = _ropes(config, family, folder)
    theta = rope.get("rope_theta") or config.get("rope_theta") or (1e6 if family == "gemma3" else 1e4)
    biased = bool(config.get("attention_bias", False)) or family == "phi"
    return ModelShape(
        architecture=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(need(config, "intermediate_size", folder)),
        vocab=int(need(config, "vocab_size", folder)),
        context=context,
        rms_eps=float(config.get("layer_norm_eps", 1e-5) if family == "phi" else config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=_scaling(rope, config, family, folder),
        tied_embeddings=bool(config.get("tie_word_embeddings", family not in UNTIED_BY_DEFAULT)),
        eos_token_ids=eos_ids(folder),
        rotary_dim=_rotary_dim(rope, config, family, head_dim, folder),
        local_rope_theta=local_theta,
        windows=_windows(config, family, layers, folder),
        attention_scale=_scale(config, family),
        attention_softcap=_cap(config, family, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(config, family, "final_logit_softcapping", 30.0),
        attention_bias=biased or family == "qwen2",
        output_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)) or family == "phi",
        mlp_matrices=2 if family == "phi" else 3,
    )


def _refuse_unsupported(config: dict[str, Any], family: str, folder: Path) -> None:
    """What would make other numbers than the checkpoint means, or mean other tensors than we read."""
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation is not None and activation not in ACTIVATIONS[family]:
        raise CheckpointError(f"{folder.name}: the activation {activation} is not supported for {family}")
    for switch in ("use_bidirectional_attention", "qk_layernorm", "alibi"):
        if config.get(switch):
            raise CheckpointError(f"{folder.name}: {switch} is not supported")
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed")
        raise CheckpointError(f"{folder.name}: weights quantised as {method} are not supported; GGUF files are")


def _ropes(config: dict[str, Any], family: str, folder: Path) -> tuple[dict[str, Any], float | None]:
    """The rotary parameters of layers that see everything, and the base of those with a window where it differs."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{folder.name}: its rope parameters are no object")
    if family != "gemma3":
        return rope, None
    local = rope.get("sliding_attention") or {}
    if str(local.get("rope_type", "default")) != "default":
        raise CheckpointError(f"{folder.name}: rope scaling of layers with a window is not supported")
    theta = local.get("rope_theta") or config.get("rope_local_base_freq") or 1e4
    return rope.get("full_attention") or ({} if "sliding_attention" in rope else rope), float(theta)


def _rotary_dim(rope: dict[str, Any], config: dict[str, Any], family: str, head_dim: int, folder: Path) -> int | None:
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if family not in PARTIAL:
        if part not in (None, 1, 1.0):
            raise CheckpointError(f"{folder.name}: partial_rotary_factor {part} is not supported for {family}")
        return None
    turned = int(head_dim * float(PARTIAL[family] if part is None else part))
    return None if turned == head_dim else turned


def _windows(config: dict[str, Any], family: str, layers: int, folder: Path) -> tuple[int | None, ...]:
    """From `layer_types` where the config has them, else by the family's rule."""
    size = config.get("sliding_window")
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        size = None
    if family in ALTERNATION and "sliding_window" not in config:
        size = 4096
    if family not in ("mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3") or size is None:
        return ()
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_kind(config, family, layer) for layer in range(min(layers, 2**16))]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise CheckpointError(f"{folder.name}: layers of type {', '.join(sorted(unknown))} are not supported")
    windows = tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)
    return windows if "sliding_attention" in kinds else ()


def _kind(config: dict[str, Any], family: str, layer: int) -> str:
    if family in ALTERNATION:
        every = int(config.get("sliding_window_pattern") or ALTERNATION[family])
        return "sliding_attention" if (layer + 1) % every else "full_attention"
    if family in ("qwen2", "qwen3"):
        return "sliding_attention" if layer >= int(config.get("max_window_layers", 28)) else "full_attention"
    return "sliding_attention"


def _scale(config: dict[str, Any], family: str) -> float | None:
    return float(config.get("query_pre_attn_scalar") or 256) ** -0.5 if family in ("gemma2", "gemma3") else None


def _cap(config: dict[str, Any], family: str, key: str, usual: float) -> float | None:
    """A soft-cap: Gemma 2 has one unless its config says null."""
    if family not in ("gemma2", "gemma3"):
        return None
    cap = config.get(key, usual if family == "gemma2" else None)
    return None if cap is None else float(cap)


def _scaling(rope: dict[str, Any], config: dict[str, Any], family: str, folder: Path) -> RopeScaling | None:
    """Formulas and defaults of transformers' `modeling_rope_utils`."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "su" or (kind == "yarn" and family == "phi3"):
        kind = "longrope"
    if kind == "default":
        return None
    context = int(need(config, "max_position_embeddings", folder))
    own = rope.get("original_max_position_embeddings")
    above = config.get("original_max_position_embeddings", 4096 if family == "phi3" else None)
    original = int(above or own or context)
    if kind == "longrope":
        return _longrope(rope, context, original, folder)
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        known = "linear, dynamic, yarn, llama3 and longrope are"
        raise CheckpointError(f"{folder.name}: rope scaling {kind} is not supported; {known}")
    factor = float(need(rope, "factor", folder))
    if kind == "llama3":
        low, high = (float(need(rope, f"{end}_freq_factor", folder)) for end in ("low", "high"))
        need(rope, "original_max_position_embeddings", folder)
        return RopeScaling(kind, factor, low, high, original)
    if kind != "yarn":
        return RopeScaling(kind, factor, original_context=original)
    return RopeScaling(
        kind,
        factor,
        original_context=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention(rope, factor),
    )


def _yarn_attention(rope: dict[str, Any], factor: float) -> float:
    """0.1 · ln s + 1 (Peng et al. 2023, §3.4), or what the checkpoint sets in its place."""
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def part(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return part(float(above)) / part(float(below)) if above and below else part(1.0)


def _longrope(rope: dict[str, Any], context: int, original: int, folder: Path) -> RopeScaling:
    """√(1 + ln s / ln L) of the attention for a context s times the original L (Ding et al. 2024)."""
    short, long = (tuple(float(f) for f in need(rope, f"{name}_factor", folder)) for name in ("short", "long"))
    factor = float(rope.get("factor") or context / original)
    given = rope.get("attention_factor")
    if given is None:
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        "longrope", factor, original_context=original, attention_factor=float(given), short_factors=short,
        long_factors=long,
    )  # fmt: skip
