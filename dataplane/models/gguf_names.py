"""Tensor names of GGUF files and of Hugging Face's checkpoints.

Layer: model algorithm. Torch-free. Tables after llama.cpp's `gguf-py/gguf/tensor_mapping.py`; a name that is not in
them stays as it is, and is then reported as left over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

TOP: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
AROUND: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
OWN_TOP: Mapping[str, Mapping[str, str]] = MappingProxyType({"phi": {"output_norm": "model.final_layernorm"}})
OWN_LAYER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma2": AROUND,
        "gemma3": AROUND,
        "phi": {
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        "phi3": {"ffn_up": "mlp.gate_up_proj"},
    }
)
"""What a family calls otherwise."""


def hugging_face_name(name: str, family: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        known = OWN_TOP.get(family, {}).get(stem) or TOP.get(stem)
        return f"{known}.{kind}" if known else name
    known = OWN_LAYER.get(family, {}).get(stem) or LAYER.get(stem)
    return f"model.layers.{layer}.{known}.{kind}" if known else name
