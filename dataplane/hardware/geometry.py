"""What a whole model costs: parameters, KV per token, and the operators of one step.

Layer: hardware. Pure. Every count follows from the geometry (DOMAIN 3.1, 3.2). Activations between layers are left
out: they stay in caches, and no serving decision moves them. An operator here stands for all layers of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from dataplane.hardware.costmodel import (
    BF16,
    FP32,
    Format,
    Op,
    Precision,
    attention,
    causal_pairs,
    experts,
    latent_attention,
    linear,
    touched_experts,
)


class DenseShape(Protocol):
    """What `Geometry.of` needs of a checkpoint's shape: `dataplane.models.shape.ModelShape` has it."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def mlp_matrices(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): ranks and head parts; without `query_rank` queries have none."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0


@dataclass(frozen=True, slots=True)
class Mixture:
    """Routed experts in all layers but the first `dense_layers`; `shared` experts see every token."""

    experts: int
    top_k: int
    inner: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class StepSize:
    """What one step computes: tokens, (query, key) pairs, keys read, and rows that are sampled."""

    tokens: int
    pairs: int
    context: int
    rows: int = 0

    @classmethod
    def prefill(cls, new: int, cached: int = 0, rows: int = 1) -> Self:
        return cls(new, causal_pairs(new, cached), new + cached, rows)

    @classmethod
    def decode(cls, contexts: Iterable[int]) -> Self:
        """One token each after `contexts` tokens, its own included."""
        lengths = list(contexts)
        return cls(len(lengths), sum(lengths), sum(lengths), len(lengths))

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.context + other.context,
            self.rows + other.rows,
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """A decoder-only transformer; sizes in elements. `matrices` of an MLP are 3 with a gate, 2 without."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    matrices: int = 3
    latent: Latent | None = None
    mixture: Mixture | None = None
    weights: Format = BF16
    kv: Format = BF16
    precision: Precision = Precision.BF16
    tied_embeddings: bool = False

    @classmethod
    def of(cls, shape: DenseShape, name: str) -> Self:
        """The geometry of a checkpoint as this engine runs it: everything in fp32."""
        return cls(
            name=name,
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            inner=shape.intermediate,
            vocab=shape.vocab,
            matrices=shape.mlp_matrices,
            weights=FP32,
            kv=FP32,
            precision=Precision.FP32,
            tied_embeddings=shape.tied_embeddings,
        )

    def kv_bytes_per_token(self, tp: int = 1) -> float:
        """Of one rank of `tp`: 2·L·⌈H_k/TP⌉·d_h·b_k; a latent is not divided: L·(d_c + d_R)·b_k (DOMAIN 3.1)."""
        if self.latent is not None:
            return self.layers * (self.latent.rank + self.latent.rope_dim) * self.kv.bytes_each
        return 2 * self.layers * -(-self.kv_heads // tp) * self.head_dim * self.kv.bytes_each

    @property
    def attention_parameters(self) -> int:
        """Of one layer's projections."""
        if (latent := self.latent) is None:
            return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        head = latent.nope_dim + latent.rope_dim
        queries = self.hidden * latent.query_rank + (latent.query_rank or self.hidden) * self.heads * head
        down = self.hidden * (latent.rank + latent.rope_dim)
        up = latent.rank * self.heads * (latent.nope_dim + latent.value_dim)
        return queries + down + up + self.heads * latent.value_dim * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Of one dense layer."""
        return self.matrices * self.hidden * self.inner

    @property
    def dense_layers(self) -> int:
        return self.layers if self.mixture is None else self.mixture.dense_layers

    @property
    def active_parameters(self) -> int:
        """Parameters of all layers that one token multiplies with: DOMAIN's P, without embedding and head."""
        total = self.layers * self.attention_parameters + self.dense_layers * self.mlp_parameters
        if (mixture := self.mixture) is not None:
            expert = self.matrices * self.hidden * mixture.inner
            router = self.hidden * mixture.experts
            total += (self.layers - self.dense_layers) * ((mixture.top_k + mixture.shared) * expert + router)
        return total

    @property
    def parameters(self) -> int:
        """All of them: every expert, embedding and head."""
        total = self.active_parameters + (1 if self.tied_embeddings else 2) * self.hidden * self.vocab
        if (mixture := self.mixture) is not None:
            idle = (mixture.experts - mixture.top_k) * self.matrices * self.hidden * mixture.inner
            total += (self.layers - self.dense_layers) * idle
        return total

    @property
    def kappa_per_token(self) -> float:
        """κ / N of the hit area: L·H·d_h / P. An MLA head counts half the sum of its key's and value's dimensions.

        That is MLA decompressed, as `step(…, absorbed=False)` and as prefill runs. The area does not charge for
        decompressing the hit, 2·L·d_c·H·(d_n + d_v) FLOPs a cached token, which the step does.
        """
        dim = float(self.head_dim)
        if (latent := self.latent) is not None:
            dim = (latent.nope_dim + latent.rope_dim + latent.value_dim) / 2
        return self.layers * self.heads * dim / self.active_parameters

    def step(self, size: StepSize, *, absorbed: bool = True) -> tuple[Op, ...]:
        """The operators of one step. Sum their FLOPs and bytes, or give them to `Ceilings.seconds`.

        `absorbed` is of account with latent attention alone. Decode absorbs the up-projections and works on latents;
        prefill decompresses keys and values, its own and the cached ones, for fewer FLOPs a pair. Say False for a
        prefill, and for what is to be compared with the hit area.
        """
        dense = self.layers * self.attention_parameters + self.dense_layers * self.mlp_parameters
        ops = [self._product("linear", dense, size.tokens), self._attend(size, absorbed=absorbed)]
        if self.mixture is not None:
            ops += self._experts(self.mixture, size.tokens)
        if size.rows:
            ops.append(self._product("head", self.hidden * self.vocab, size.rows))
        return tuple(ops)

    def _product(self, name: str, parameters: int, tokens: int) -> Op:
        return linear(tokens, parameters, 1, self.weights, activations=None, precision=self.precision, name=name)

    def _attend(self, size: StepSize, *, absorbed: bool) -> Op:
        if (latent := self.latent) is not None and not absorbed:
            # The projections of this step's own tokens are among the linear layers.
            up = latent.rank * self.heads * (latent.nope_dim + latent.value_dim) * (size.context - size.tokens)
            pairs = self.heads * (latent.nope_dim + latent.rope_dim + latent.value_dim) * size.pairs
            moved = size.context * (latent.rank + latent.rope_dim) * self.kv.bytes_each
            one = Op("latent attention", 2.0 * (pairs + up), moved, self.precision)
        elif latent is not None:
            one = latent_attention(
                queries=size.tokens, pairs=size.pairs, context=size.context, heads=self.heads, rank=latent.rank,
                rope_dim=latent.rope_dim, kv=self.kv, activations=None, precision=self.precision,
            )  # fmt: skip
        else:
            one = attention(
                queries=size.tokens, pairs=size.pairs, context=size.context, heads=self.heads, kv_heads=self.kv_heads,
                head_dim=self.head_dim, kv=self.kv, activations=None, precision=self.precision,
            )  # fmt: skip
        return Op(one.name, self.layers * one.flops, self.layers * one.bytes, one.precision)

    def _experts(self, mixture: Mixture, tokens: int) -> list[Op]:
        layers = self.layers - self.dense_layers
        shared = mixture.shared * self.matrices * self.hidden * mixture.inner + self.hidden * mixture.experts
        touched = touched_experts(mixture.experts, mixture.top_k, tokens)
        routed = experts(
            tokens=tokens, hidden=self.hidden, inner=mixture.inner, top_k=mixture.top_k, touched=touched,
            weights=self.weights, matrices=self.matrices, activations=None, precision=self.precision,
        )  # fmt: skip
        return [
            self._product("shared experts and router", layers * shared, tokens),
            Op(routed.name, layers * routed.flops, layers * routed.bytes, routed.precision),
        ]


def totals(ops: Sequence[Op]) -> tuple[float, float]:
    """(FLOPs, bytes) of operators together."""
    return sum(op.flops for op in ops), sum(op.bytes for op in ops)


LLAMA_3_1_8B = Geometry("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
"""meta-llama/Llama-3.1-8B config.json."""
OPT_13B = Geometry("OPT-13B", 40, 5120, 40, 40, 128, 20480, 50272, matrices=2, tied_embeddings=True)
"""facebook/opt-13b config.json."""
DEEPSEEK_V2 = Geometry(
    "DeepSeek-V2", 60, 5120, 128, 128, 128, 12288, 102400,
    latent=Latent(512, 64, 128, 128, 1536), mixture=Mixture(160, 6, 1536, shared=2, dense_layers=1),
)  # fmt: skip
"""deepseek-ai/DeepSeek-V2 config.json."""
DEEPSEEK_V3 = Geometry(
    "DeepSeek-V3", 61, 7168, 128, 128, 128, 18432, 129280,
    latent=Latent(512, 64, 128, 128, 1536), mixture=Mixture(256, 8, 2048, shared=1, dense_layers=3),
)  # fmt: skip
"""deepseek-ai/DeepSeek-V3 config.json, without the multi-token-prediction layer."""
KNOWN = (LLAMA_3_1_8B, OPT_13B, DEEPSEEK_V2, DEEPSEEK_V3)
