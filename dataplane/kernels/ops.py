"""The operations a decoder is written with, in plain torch: the seam between a model and what computes it.

Layer: kernel. A model's `forward` calls these functions and `Attention.run`, and nothing else, so that what is behind
them may be replaced, or a call recorded instead of run. A value is a matrix [T, width] of one step's T tokens (or of
R sampled rows); its heads lie side by side in its columns. Parameters and tables are tensors that never change while
a model serves. A call with a symbol in place of its first value is recorded (`kernels.recording`). Every function
returns a new value and leaves its arguments as they are; `split` gives ranges of columns that may share memory with
what was split. FLOPs and bytes are those of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from dataplane.kernels.recording import recordable


class Attention(Protocol):
    """Attention of one planned step over the paged KV: stores k, v and returns what the queries attend to."""

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """q [T, H · d], k and v [T, H_k · d] → [T, H · d].

        softmax(cap(scale · q · kᵀ)) · v over the keys a query sees: those at its position and before, of which with
        `window` only the nearest so many, its own among them (Beltagy et al. 2020, §3.1). cap(s) is
        softcap · tanh(s / softcap) (Gemma 2, §2), or s.
        """


class Turn(NamedTuple):
    """How far the heads of each token turn, made once a step by `turn`; only `rotate` looks inside.

    cos and sin are [T, 1, r], sin of the first half negated.
    """

    cos: Tensor
    sin: Tensor


@recordable
def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows `ids` [T] of a table [n, width] → [T, width]."""
    return F.embedding(ids, table)


@recordable
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, i] · Wᵀ + b, W [o, i], b [o] → [T, o]. 2·T·i·o FLOPs; reads W once."""
    return F.linear(x, weight, bias)


@recordable
def split(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Ranges of columns, as wide as `sizes` says, left to right; together they are all of x."""
    return torch.split_with_sizes(x, sizes, -1)


@recordable
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, both [T, width]."""
    return x + y


@recordable
def scale(x: Tensor, factor: float) -> Tensor:
    """x · factor."""
    return x * factor


@recordable
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap) (Gemma 2, §2): keeps values within ±cap."""
    return torch.tanh(x / cap) * cap


@recordable
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · w / sqrt(mean(x²) + ε) (Zhang & Sennrich 2019), w [d].

    x [T, n · d] is n groups of d columns, each normalised by itself: n is 1 for a hidden state and the number of
    heads for queries and keys.
    """
    size = weight.shape[0]
    if x.shape[-1] == size:
        return F.rms_norm(x, (size,), weight, eps)
    return F.rms_norm(x.view(x.shape[0], -1, size), (size,), weight, eps).flatten(1)


@recordable
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x − mean) / sqrt(var + ε) · w + b over the columns (Ba et al. 2016), w and b [width]."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@recordable
def turn(positions: Tensor, cos: Tensor, sin: Tensor) -> Turn:
    """The angles of tokens at `positions` [T], from tables of cos and sin [n, r] whose halves are alike."""
    first, second = F.embedding(positions, sin).unsqueeze(1).chunk(2, dim=-1)
    return Turn(F.embedding(positions, cos).unsqueeze(1), torch.cat((-first, second), dim=-1))


@recordable
def rotate(x: Tensor, by: Turn, head_dim: int) -> Tensor:
    """Turn the first r columns of each head of x [T, n · head_dim] (Su et al. 2021, §3.2).

    Columns i and i + r/2 are a pair: (a, b) → (a · cos − b · sin, b · cos + a · sin). Columns from r on stay as they
    are.
    """
    heads = x.view(x.shape[0], -1, head_dim)
    turned = by.cos.shape[-1]
    part = heads if turned == head_dim else heads[..., :turned]
    left, right = part.chunk(2, dim=-1)
    out = torch.addcmul(part * by.cos, torch.cat((right, left), dim=-1), by.sin)
    if turned < head_dim:
        out = torch.cat((out, heads[..., turned:]), dim=-1)
    return out.flatten(1)


@recordable
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(g) · u for gate_up [T, 2 · n] = g ‖ u → [T, n] (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@recordable
def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(g) · u for gate_up [T, 2 · n] = g ‖ u → [T, n] (GeGLU, Shazeer 2020), gelu by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@recordable
def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³))) (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")
