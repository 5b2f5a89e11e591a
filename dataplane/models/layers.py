"""What decoders are put together from: products, norms, attention and MLPs, and the decoder around them.

Layer: model algorithm. It computes; it does not know about requests, blocks or steps. Attention reads and writes KV
through the `Attention` it is handed. Query, key and value weights lie in one matrix, as do gate and up, so that a
layer is four matrix products; `weights` says which checkpoint tensor fills which part.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from dataplane.kernels import ops
from dataplane.kernels.ops import Attention, Turn
from dataplane.models.rope import RotaryEmbedding
from dataplane.models.shape import ModelShape

Weights = dict[str, Tensor]


def parameter(*size: int) -> nn.Parameter:
    """Uninitialised, for the loader."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


def under(prefix: str, weights: Weights) -> Weights:
    """The same weights with `prefix` and a dot before each name."""
    return {f"{prefix}.{name}": tensor for name, tensor in weights.items()}


class Linear(nn.Module):
    """x · Wᵀ + b, W [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs)
        self.bias = parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def weights(self, *names: str, sizes: list[int] | None = None) -> Weights:
        """Weight and bias as `names`, whose rows follow each other with `sizes`."""
        sizes = sizes or [self.weight.shape[0]]
        found = {f"{name}.weight": part for name, part in zip(names, torch.split(self.weight, sizes), strict=True)}
        if self.bias is not None:
            found |= {f"{name}.bias": part for name, part in zip(names, torch.split(self.bias, sizes), strict=True)}
        return found


class RMSNorm(nn.Module):
    """x · w / sqrt(mean(x²) + ε) (Zhang & Sennrich 2019), over the columns or over each head of `size`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def weights(self, name: str) -> Weights:
        return {f"{name}.weight": self.weight}


class LayerNorm(nn.Module):
    """(x − mean) / sqrt(var + ε) · w + b (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = parameter(size), parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def weights(self, name: str) -> Weights:
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023)."""

    out_name: ClassVar[str] = "o_proj"

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        self.scale, self.window, self.softcap = shape.scale, shape.window(layer), shape.attention_softcap
        self.q_size, self.kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = Linear(shape.hidden, self.q_size + 2 * self.kv_size, bias=shape.attention_bias)
        self.out = Linear(self.q_size, shape.hidden, bias=shape.output_bias)

    def forward(self, x: Tensor, turn: Turn, attention: Attention) -> Tensor:
        qk, v = ops.split(self.qkv(x), (self.q_size + self.kv_size, self.kv_size))
        q, k = ops.split(ops.rotate(qk, turn, self.head_dim), (self.q_size, self.kv_size))
        return self.out(self.attend(attention, q, k, v))  # type: ignore[no-any-return]

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H · d], k and v [T, H_k · d] → [T, H · d], as this layer's queries see."""
        return attention.run(self.layer, q, k, v, scale=self.scale, window=self.window, softcap=self.softcap)

    def weights(self) -> Weights:
        sizes = [self.q_size, self.kv_size, self.kv_size]
        return self.qkv.weights("q_proj", "k_proj", "v_proj", sizes=sizes) | self.out.weights(self.out_name)


class NormedAttention(SelfAttention):
    """Queries and keys are normalised head by head before they turn (Henry et al. 2020)."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__(shape, layer)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps)

    def forward(self, x: Tensor, turn: Turn, attention: Attention) -> Tensor:
        q, k, v = ops.split(self.qkv(x), (self.q_size, self.kv_size, self.kv_size))
        q = ops.rotate(self.q_norm(q), turn, self.head_dim)
        k = ops.rotate(self.k_norm(k), turn, self.head_dim)
        return self.out(self.attend(attention, q, k, v))  # type: ignore[no-any-return]

    def weights(self) -> Weights:
        return super().weights() | self.q_norm.weights("q_norm") | self.k_norm.weights("k_norm")


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = Linear(shape.hidden, 2 * shape.intermediate, bias=shape.mlp_bias)
        self.down = Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ops.silu_mul(self.gate_up(x)))  # type: ignore[no-any-return]

    def weights(self) -> Weights:
        half = self.gate_up.weight.shape[0] // 2
        return self.gate_up.weights("gate_proj", "up_proj", sizes=[half, half]) | self.down.weights("down_proj")


class DecoderLayer(Protocol):
    """One layer of the residual stream."""

    def __call__(self, x: Tensor, turn: Turn, attention: Attention) -> Tensor:
        """x [T, hidden] → [T, hidden]; `turn` is that of the tokens' positions."""

    def weights(self) -> Weights:
        """Tensor name within the layer → the part that it fills."""


class Decoder(nn.Module):
    """Embedding, layers, norm, head. `forward` gives hidden states for every token; `logits` is applied only to rows
    that are sampled."""

    layer_kind: ClassVar[type[nn.Module]]
    norm_name: ClassVar[str] = "model.norm"

    def __init__(self, shape: ModelShape, positions: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = parameter(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(self.layer_kind(shape, layer) for layer in range(shape.layers))
        self.norm = self.last_norm(shape)
        self.head = self.embedding if shape.tied_embeddings else parameter(shape.vocab, shape.hidden)
        self.rotary = RotaryEmbedding(shape, positions)

    def last_norm(self, shape: ModelShape) -> RMSNorm | LayerNorm:
        return RMSNorm(shape.hidden, shape.rms_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions [T] → normalised hidden states [T, hidden]."""
        x = ops.embed(token_ids, self.embedding)
        turn = self.rotary.at(positions)
        for layer in self.layers:
            x = layer(x, turn, attention)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] → logits [R, vocab]."""
        return ops.linear(hidden, self.head)

    def weights(self) -> Weights:
        """Checkpoint tensor name (Hugging Face) → the part of this model that it fills."""
        found = {"model.embed_tokens.weight": self.embedding} | self.norm.weights(self.norm_name)
        if not self.shape.tied_embeddings:
            found["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            found |= under(f"model.layers.{index}", cast(DecoderLayer, layer).weights())
        return found
