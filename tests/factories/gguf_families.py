"""Tiny models of every family as GGUF files, by the rules of llama.cpp's `convert_hf_to_gguf.py`.

Tensor names come from the `gguf` package's own map, so that a wrong name in our tables shows.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from tests.factories.models import permute

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi": MODEL_ARCH.PHI2,
    "phi3": MODEL_ARCH.PHI3,
}


def converted(
    path: Path, model: PreTrainedModel, *, kind: GGMLQuantizationType = GGMLQuantizationType.F32, fused: bool = False
) -> Path:
    """The model as one GGUF file, matrices in `kind`. `fused` joins q, k and v as old files of Phi-2 have them."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _metadata(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in _tensors(model, fused=fused).items():
        spelt = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert spelt, name
        if values.ndim == 1:
            writer.add_tensor(spelt, values)
        else:
            writer.add_tensor(spelt, quantize(values, kind), raw_dtype=kind)
    for spelt, factors in _rope_factors(config).items():
        writer.add_tensor(spelt, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: PreTrainedModel, *, fused: bool) -> dict[str, NDArray[np.float32]]:
    config, found = model.config, {}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.detach().numpy()
        if config.model_type in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
            rows = permute(values.reshape(len(values), -1), heads if ".q_proj." in name else kv_heads)
            values = rows.reshape(values.shape)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        found[name] = values
    if fused:
        for name in [name for name in found if ".q_proj." in name]:
            parts = [found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            found[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(parts)
    return found


def _metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_eos_token_id(config.eos_token_id)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type == "phi":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None) and not config.model_type.startswith("qwen"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _rope(writer, config, head_dim)


def _rope(writer: gguf.GGUFWriter, config: PreTrainedConfig, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type != "gemma3_text":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _rope_factors(config: PreTrainedConfig) -> dict[str, NDArray[np.float32]]:
    rope = config.rope_parameters
    return {
        f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], dtype=np.float32)
        for name in ("long", "short")
        if f"{name}_factor" in rope
    }
