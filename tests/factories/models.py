"""Tiny models with random weights, as safetensors folders and as GGUF files, and the real small one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A small Llama configuration, Hugging Face's names."""
    return {**TINY, **overrides}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights for `config`, spread widely enough that no two logits are close by accident."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_size = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 2 / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": norm(),
            "post_attention_layernorm.weight": norm(),
            "self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            "self_attn.k_proj.weight": matrix(kv_size, hidden),
            "self_attn.v_proj.weight": matrix(kv_size, hidden),
            "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            "mlp.gate_proj.weight": matrix(config["intermediate_size"], hidden),
            "mlp.up_proj.weight": matrix(config["intermediate_size"], hidden),
            "mlp.down_proj.weight": matrix(hidden, config["intermediate_size"]),
        }
        weights |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return weights


def write_safetensors(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None, *, shards: int = 1
) -> Path:
    """`config.json` and the weights, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(config) if weights is None else weights
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(weights)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor] | None = None,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    leave_out: Iterable[str] = (),
    extra: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it: matrices in `kind`, q and k rows in its rotary order."""
    weights = tiny_weights(config) if weights is None else weights
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    skipped = set(leave_out)
    for name, tensor in weights.items():
        spelt = _gguf_name(name)
        if spelt in skipped:
            continue
        values = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = permute(values, heads if "q_proj" in name else kv_heads)
        if values.ndim == 1:
            writer.add_tensor(spelt, values)
        else:
            writer.add_tensor(spelt, quantize(values, kind), raw_dtype=kind)
    for spelt, values in (extra or {}).items():
        writer.add_tensor(spelt, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Hugging Face's rotary order to llama.cpp's: row (half, pair) of a head goes to (pair, half)."""
    out = np.empty_like(values)
    dim = values.shape[0] // heads
    for row in range(values.shape[0]):
        head, at = divmod(row, dim)
        half, pair = divmod(at, dim // 2)
        out[head * dim + 2 * pair + half] = values[row]
    return out


def _gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, index, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{index}.{GGUF_NAMES['.'.join(rest)]}.weight"
