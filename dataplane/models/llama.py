"""The Llama decoder (Touvron et al. 2023): pre-norm, rotary positions, grouped-query attention, SwiGLU.

Layer: model algorithm. It computes; it does not know about requests, blocks or steps. Attention reads and
writes KV through the `Attention` it is handed. Query, key and value weights lie in one matrix, as do gate
and up, so that a layer is four matrix products; `weights` says which checkpoint tensor fills which part.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor, nn

from dataplane.models.rope import RotaryEmbedding, rotate
from dataplane.models.shape import ModelShape


class Attention(Protocol):
    """Attention of one planned step over the paged KV: stores k, v and returns what the queries attend to."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, d], k and v [T, H_k, d] → [T, H · d]."""


class Linear(nn.Module):
    """x · Wᵀ, W [outputs, inputs], left uninitialised for the loader."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """x · w / sqrt(mean(x²) + ε) (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SelfAttention(nn.Module):
    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_size, self.kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = Linear(shape.hidden, self.q_size + 2 * self.kv_size)
        self.out = Linear(self.q_size, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        tokens = x.shape[0]
        qkv = self.qkv(x).view(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = rotate(qkv[:, : self.heads + self.kv_heads], cos, sin)
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        v = qkv[:, self.heads + self.kv_heads :]
        return self.out(attention.run(self.layer, q, k, v))  # type: ignore[no-any-return]

    def weights(self) -> dict[str, Tensor]:
        keys = self.q_size + self.kv_size
        return {
            "q_proj.weight": self.qkv.weight[: self.q_size],
            "k_proj.weight": self.qkv.weight[self.q_size : keys],
            "v_proj.weight": self.qkv.weight[keys:],
            "o_proj.weight": self.out.weight,
        }


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = Linear(shape.hidden, 2 * shape.intermediate)
        self.down = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]

    def weights(self) -> dict[str, Tensor]:
        gate, up = self.gate_up.weight.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down.weight}


class DecoderLayer(nn.Module):
    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.attention = SelfAttention(shape, layer)
        self.post_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, attention)
        return x + self.mlp(self.post_norm(x))  # type: ignore[no-any-return]

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_norm.weight,
        }
        found |= {f"self_attn.{name}": tensor for name, tensor in self.attention.weights().items()}
        return found | {f"mlp.{name}": tensor for name, tensor in self.mlp.weights().items()}


class Llama(nn.Module):
    """`forward` gives hidden states for every token; `logits` is applied only to rows that are sampled."""

    def __init__(self, shape: ModelShape, positions: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocab, shape.hidden), requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        head = self.embedding if shape.tied_embeddings else torch.empty(shape.vocab, shape.hidden)
        self.head = nn.Parameter(head, requires_grad=False)
        self.rotary = RotaryEmbedding(shape, positions)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions [T] → normalised hidden states [T, hidden]."""
        x = F.embedding(token_ids, self.embedding)
        cos, sin = self.rotary.at(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] → logits [R, vocab] in float32."""
        return F.linear(hidden, self.head).float()

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint tensor name (Hugging Face) → the part of this model that it fills."""
        found: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if not self.shape.tied_embeddings:
            found["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.weights().items()}
        return found
