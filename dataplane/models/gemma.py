"""Gemma 1, 2 and 3 (Gemma Team 2024, 2024, 2025), text only.

Layer: model algorithm. All scale the embedding by √hidden and gate with GELU; their norms multiply by 1 + w, which the
loader folds in. Gemma 2 norms what a layer adds as well, caps scores and logits and alternates windows with full
attention; Gemma 3 norms queries and keys and turns the layers with a window by a base of their own.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from dataplane.kernels import ops
from dataplane.kernels.ops import Attention, Turn
from dataplane.models.layers import Decoder, NormedAttention, RMSNorm, SelfAttention, SwiGLU, Weights, under
from dataplane.models.llama import LlamaLayer
from dataplane.models.rope import RotaryEmbedding
from dataplane.models.shape import ModelShape


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) · up(x)) (Shazeer 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ops.gelu_tanh_mul(self.gate_up(x)))  # type: ignore[no-any-return]


class GemmaLayer(LlamaLayer):
    mlp_kind = GeGLU


class Gemma(Decoder):
    layer_kind: ClassVar[type[nn.Module]] = GemmaLayer

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = ops.scale(ops.embed(token_ids, self.embedding), self.shape.hidden**0.5)
        turn = self.rotary.at(positions)
        for layer in self.layers:
            x = layer(x, turn, attention)
        return self.norm(x)  # type: ignore[no-any-return]


class Gemma2Layer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    attention_kind: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.before_attention = RMSNorm(shape.hidden, shape.rms_eps)
        self.attention = self.attention_kind(shape, layer)
        self.after_attention = RMSNorm(shape.hidden, shape.rms_eps)
        self.before_mlp = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = GeGLU(shape)
        self.after_mlp = RMSNorm(shape.hidden, shape.rms_eps)

    def forward(self, x: Tensor, turn: Turn, attention: Attention) -> Tensor:
        x = ops.add(x, self.after_attention(self.attention(self.before_attention(x), turn, attention)))
        return ops.add(x, self.after_mlp(self.mlp(self.before_mlp(x))))

    def weights(self) -> Weights:
        norms = (
            self.before_attention.weights("input_layernorm")
            | self.after_attention.weights("post_attention_layernorm")
            | self.before_mlp.weights("pre_feedforward_layernorm")
            | self.after_mlp.weights("post_feedforward_layernorm")
        )
        return norms | under("self_attn", self.attention.weights()) | under("mlp", self.mlp.weights())


class Gemma2(Gemma):
    layer_kind = Gemma2Layer

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        cap = self.shape.logit_softcap
        return logits if cap is None else ops.softcap(logits, cap)


class Gemma3Layer(Gemma2Layer):
    attention_kind = NormedAttention


class Gemma3(Gemma2):
    layer_kind = Gemma3Layer

    def __init__(self, shape: ModelShape, positions: int) -> None:
        super().__init__(shape, positions)
        self.local_rotary = RotaryEmbedding(shape, positions, local=True)
        self.is_local = [shape.window(layer) is not None for layer in range(shape.layers)]

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = ops.scale(ops.embed(token_ids, self.embedding), self.shape.hidden**0.5)
        everywhere, nearby = self.rotary.at(positions), self.local_rotary.at(positions)
        for layer, is_local in zip(self.layers, self.is_local, strict=True):
            x = layer(x, nearby if is_local else everywhere, attention)
        return self.norm(x)  # type: ignore[no-any-return]
