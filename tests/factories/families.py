"""Tiny models of every family, made with transformers: random weights, saved as Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

WINDOW = 16
"""Keys that a layer with a window sees: fewer than most prompts have."""
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {**COMMON, "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def config_of(variant: str, **overrides: Any) -> PreTrainedConfig:
    """A configuration of its family, small, with what sets the family apart switched on."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    made: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
        "llama-biased": (LlamaConfig, {**COMMON, "attention_bias": True, "mlp_bias": True}),
        "llama-yarn": (LlamaConfig, {**COMMON, "rope_parameters": YARN}),
        "llama-dynamic": (
            LlamaConfig,
            {
                **COMMON,
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            },
        ),
        "mistral": (MistralConfig, {**COMMON, "sliding_window": WINDOW, "head_dim": 16}),
        "qwen2": (Qwen2Config, {**COMMON, "tie_word_embeddings": True}),
        "qwen2-window": (
            Qwen2Config,
            {**COMMON, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        "qwen3": (Qwen3Config, {**COMMON, "head_dim": 32, "tie_word_embeddings": True}),
        "gemma": (GemmaConfig, {**GEMMA, "num_key_value_heads": 1}),
        "gemma2": (Gemma2Config, {**GEMMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
        "gemma3": (
            Gemma3TextConfig,
            {
                **GEMMA,
                "sliding_window": WINDOW,
                "query_pre_attn_scalar": 24,
                "layer_types": kinds,
                "rope_parameters": GEMMA3_ROPE,
            },
        ),
        "phi": (PhiConfig, {**COMMON, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
        "phi3": (Phi3Config, {**COMMON, "sliding_window": WINDOW, "partial_rotary_factor": 0.75}),
        "phi3-long": (Phi3Config, {**COMMON, "original_max_position_embeddings": 64, "rope_parameters": LONG}),
    }
    kind, values = made[variant]
    return kind(**{**values, **overrides})


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with weights spread widely enough that no two logits are close by accident."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    offset = 0.0 if config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("bias"):
                tensor.copy_(0.3 * noise)
            elif tensor.ndim == 1:
                tensor.copy_(offset + 0.2 * noise)
            else:
                tensor.copy_(noise * (2 / tensor.shape[1] ** 0.5))
        if config.tie_word_embeddings and config.model_type.startswith("gemma"):
            model.get_input_embeddings().weight.mul_(0.5)
    return model


def saved(folder: Path, variant: str, shard: str = "1GB", **overrides: Any) -> tuple[Path, PreTrainedModel]:
    """The checkpoint of a random model of `variant`, as transformers writes it, and the model."""
    model = random_model(config_of(variant, **overrides))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder, model


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """transformers' logits of every position, [tokens, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]
