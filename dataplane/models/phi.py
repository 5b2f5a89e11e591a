"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023): attention and MLP side by side on one LayerNorm, biases everywhere.

Layer: model algorithm. Only the first part of each head turns with the position, as the shape says.
"""

from __future__ import annotations

from torch import Tensor, nn

from dataplane.kernels import ops
from dataplane.kernels.ops import Attention, Turn
from dataplane.models.layers import (
    Decoder,
    LayerNorm,
    Linear,
    RMSNorm,
    SelfAttention,
    Weights,
    parameter,
    under,
)
from dataplane.models.shape import ModelShape


class PhiAttention(SelfAttention):
    out_name = "dense"


class PhiMLP(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.fc1 = Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.fc2 = Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(ops.gelu_tanh(self.fc1(x)))  # type: ignore[no-any-return]

    def weights(self) -> Weights:
        return self.fc1.weights("fc1") | self.fc2.weights("fc2")


class PhiLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.norm = LayerNorm(shape.hidden, shape.rms_eps)
        self.attention = PhiAttention(shape, layer)
        self.mlp = PhiMLP(shape)

    def forward(self, x: Tensor, turn: Turn, attention: Attention) -> Tensor:
        normed = self.norm(x)
        both = ops.add(self.attention(normed, turn, attention), self.mlp(normed))
        return ops.add(x, both)

    def weights(self) -> Weights:
        found = self.norm.weights("input_layernorm") | under("self_attn", self.attention.weights())
        return found | under("mlp", self.mlp.weights())


class Phi(Decoder):
    layer_kind = PhiLayer
    norm_name = "model.final_layernorm"

    def __init__(self, shape: ModelShape, positions: int) -> None:
        super().__init__(shape, positions)
        self.head_bias = parameter(shape.vocab)

    def last_norm(self, shape: ModelShape) -> RMSNorm | LayerNorm:
        return LayerNorm(shape.hidden, shape.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self.head, self.head_bias)

    def weights(self) -> Weights:
        return super().weights() | {"lm_head.bias": self.head_bias}
