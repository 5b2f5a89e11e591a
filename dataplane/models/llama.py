"""The Llama decoder (Touvron et al. 2023) and its kin: pre-norm, rotary positions, grouped-query attention, SwiGLU.

Layer: model algorithm. Mistral (Jiang et al. 2023) adds a sliding window, Qwen2 (2024) a bias to queries, keys and
values, both declared by the shape; Qwen3 (2025) normalises queries and keys; Phi-3 (2024) stores its matrices fused.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from dataplane.kernels import ops
from dataplane.kernels.ops import Attention, Turn
from dataplane.models.layers import (
    Decoder,
    NormedAttention,
    RMSNorm,
    SelfAttention,
    SwiGLU,
    Weights,
    under,
)
from dataplane.models.shape import ModelShape


class LlamaLayer(nn.Module):
    attention_kind: ClassVar[type[SelfAttention]] = SelfAttention
    mlp_kind: ClassVar[type[SwiGLU]] = SwiGLU

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.attention = self.attention_kind(shape, layer)
        self.post_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = self.mlp_kind(shape)

    def forward(self, x: Tensor, turn: Turn, attention: Attention) -> Tensor:
        x = ops.add(x, self.attention(self.input_norm(x), turn, attention))
        return ops.add(x, self.mlp(self.post_norm(x)))

    def weights(self) -> Weights:
        norms = self.input_norm.weights("input_layernorm") | self.post_norm.weights("post_attention_layernorm")
        return norms | under("self_attn", self.attention.weights()) | under("mlp", self.mlp.weights())


class Llama(Decoder):
    """Llama, Mistral and Qwen2."""

    layer_kind = LlamaLayer


class Qwen3Layer(LlamaLayer):
    attention_kind = NormedAttention


class Qwen3(Decoder):
    layer_kind = Qwen3Layer


class FusedAttention(SelfAttention):
    def weights(self) -> Weights:
        return self.qkv.weights("qkv_proj") | self.out.weights("o_proj")


class FusedSwiGLU(SwiGLU):
    def weights(self) -> Weights:
        return self.gate_up.weights("gate_up_proj") | self.down.weights("down_proj")


class Phi3Layer(LlamaLayer):
    attention_kind, mlp_kind = FusedAttention, FusedSwiGLU


class Phi3(Decoder):
    layer_kind = Phi3Layer
