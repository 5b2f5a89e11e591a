"""What an operator costs: FLOPs and bytes from its shapes, and the least time they take on a device.

Layer: hardware. Pure. The roofline (Williams, Waterman & Patterson 2009): T = max(FLOPs / (η_F·F), bytes / (η_W·W)).
FLOPs count a multiply-add as two. Bytes are those that must cross the memory bus once, if nothing stays in a cache
from before: weights, KV and, where an activation format is given, inputs and outputs. Norms, rotations and softmax
are left out: they are no matrix products, and their inputs are counted with the products beside them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from dataplane.hardware.figure import FigureKind


class Precision(enum.StrEnum):
    """In what the multiplications run; a device has one ceiling for each it supports."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


class Bound(enum.StrEnum):
    """Which side of the roofline an operator lies under."""

    COMPUTE = "compute"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored: `bits` each, and with a `group` that many of them share `group_bits` of scale and zero.

    Effective bits are b + s/g; with a 16-bit scale and a b-bit zero, b + (16 + b)/g (DOMAIN §27).
    """

    name: str
    bits: int
    group: int = 0
    group_bits: int = 0

    @property
    def bytes_each(self) -> float:
        """Bytes of one number, its share of scale and zero included."""
        shared = self.group_bits / self.group if self.group else 0.0
        return (self.bits + shared) / 8


def grouped(bits: int, group: int = 128, *, zero: bool = True) -> Format:
    """Integers in groups with a 16-bit scale, and a zero of `bits` if asymmetric."""
    return Format(f"int{bits}g{group}", bits, group, 16 + (bits if zero else 0))


FP32 = Format("fp32", 32)
BF16 = Format("bf16", 16)
FP8 = Format("fp8", 8)
INT8 = Format("int8", 8)
FP8_BLOCK = Format("fp8_block", 8, 128 * 128, 32)
"""DeepSeek-V3's weights: one fp32 scale for a block of 128 × 128."""
MXFP4 = Format("mxfp4", 4, 32, 8)
"""OCP microscaling: one 8-bit exponent for 32 numbers."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator's work."""

    name: str
    flops: float
    bytes: float
    precision: Precision = Precision.BF16

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise ValueError(f"{self.name} cannot take {self.flops} FLOPs and {self.bytes} bytes")

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else float("inf")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device can do at most: FLOP/s by precision, bytes/s, and the share of each that is reached.

    `launch_s` is what every operator takes besides. `kind` and `source` are those of the numbers.
    """

    flops: Mapping[Precision, float]
    bandwidth: float
    kind: FigureKind
    source: str
    flops_share: float = 1.0
    bandwidth_share: float = 1.0
    launch_s: float = 0.0

    def peak(self, precision: Precision) -> float:
        """FLOP/s that can be reached in `precision`. Raises LookupError where the device has none."""
        try:
            return self.flops[precision] * self.flops_share
        except KeyError:
            raise LookupError(f"{self.source} gives no ceiling for {precision}") from None

    def compute_s(self, op: Op) -> float:
        return op.flops / self.peak(op.precision)

    def memory_s(self, op: Op) -> float:
        return op.bytes / (self.bandwidth * self.bandwidth_share)

    def seconds(self, ops: Op | Iterable[Op]) -> float:
        """The least time of one operator, or of several after one another."""
        several = (ops,) if isinstance(ops, Op) else ops
        return sum(max(self.compute_s(op), self.memory_s(op)) + self.launch_s for op in several)

    def bound(self, op: Op) -> Bound:
        return Bound.COMPUTE if self.compute_s(op) > self.memory_s(op) else Bound.MEMORY

    def derated(
        self, *, flops_share: float, bandwidth_share: float, launch_s: float, kind: FigureKind, source: str
    ) -> Self:
        """The same device with what is reached of it in practice."""
        return replace(
            self, flops_share=flops_share, bandwidth_share=bandwidth_share, launch_s=launch_s, kind=kind, source=source
        )

    def halved(self) -> Self:
        """A device with half of everything, which measurements of this one should beat."""
        return self.derated(
            flops_share=self.flops_share / 2,
            bandwidth_share=self.bandwidth_share / 2,
            launch_s=self.launch_s,
            kind=self.kind,
            source=f"half of {self.source}",
        )


def critical_batch(ceilings: Ceilings, precision: Precision, weights: Format) -> float:
    """Tokens from which a linear layer is bound by compute: B* = F·b_w / (2·W) (DOMAIN 3.2)."""
    reached = ceilings.bandwidth * ceilings.bandwidth_share
    return ceilings.peak(precision) * weights.bytes_each / (2 * reached)


def causal_pairs(new: int, cached: int = 0, window: int = 0) -> int:
    """(query, key) pairs of `new` tokens after `cached`: A = n·h + n(n+1)/2; a `window` bounds the keys of each."""
    if not window:
        return new * cached + new * (new + 1) // 2
    growing = min(new, max(0, window - cached))
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def linear(
    tokens: int,
    inputs: int,
    outputs: int,
    weights: Format = BF16,
    *,
    activations: Format | None = BF16,
    written: Format | None = None,
    precision: Precision = Precision.BF16,
    name: str = "linear",
) -> Op:
    """x [tokens, inputs] · W [inputs, outputs]. `written` is the output's format, `activations` unless given."""
    moved = inputs * outputs * weights.bytes_each
    if activations is not None:
        moved += tokens * (inputs * activations.bytes_each + outputs * (written or activations).bytes_each)
    return Op(name, 2.0 * tokens * inputs * outputs, moved, precision)


def attention(
    *,
    queries: int,
    pairs: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv: Format = BF16,
    activations: Format | None = BF16,
    precision: Precision = Precision.BF16,
    name: str = "attention",
) -> Op:
    """Softmax attention of one layer: Q·Kᵀ and P·V over `pairs`; the keys and values of `context` are read once.

    MHA is kv_heads = heads, MQA is 1. `activations` is the format of queries and outputs.
    """
    moved = 2 * context * kv_heads * head_dim * kv.bytes_each
    if activations is not None:
        moved += 2 * queries * heads * head_dim * activations.bytes_each
    return Op(name, 4.0 * heads * head_dim * pairs, moved, precision)


def latent_attention(
    *,
    queries: int,
    pairs: int,
    context: int,
    heads: int,
    rank: int,
    rope_dim: int,
    kv: Format = BF16,
    activations: Format | None = BF16,
    precision: Precision = Precision.BF16,
    name: str = "latent attention",
) -> Op:
    """Absorbed MLA of one layer (DeepSeek-V2, 2024): each head scores the cached latent and its rotary key, and sums
    latents: 2·H·(2·d_c + d_R) FLOPs a pair. One latent of d_c + d_R serves all heads, whatever the parallelism."""
    moved = context * (rank + rope_dim) * kv.bytes_each
    if activations is not None:
        moved += queries * heads * (2 * rank + rope_dim) * activations.bytes_each
    return Op(name, 2.0 * heads * (2 * rank + rope_dim) * pairs, moved, precision)


def touched_experts(experts: int, top_k: int, tokens: int) -> float:
    """Experts of a layer that `tokens` touch, if each chooses uniformly and alone: E·(1 − (1 − t/E)^B) (DOMAIN 3.2).

    A skewed router touches fewer: see `least_touched`.
    """
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def least_touched(experts: int, top_k: int, tokens: int) -> float:
    """The fewest experts any routing of at least one token can touch: those of one token."""
    return float(min(experts, top_k)) if tokens else 0.0


def experts(
    *,
    tokens: int,
    hidden: int,
    inner: int,
    top_k: int,
    touched: float,
    weights: Format = BF16,
    matrices: int = 3,
    activations: Format | None = BF16,
    precision: Precision = Precision.BF16,
    share: float = 1.0,
    name: str = "experts",
) -> Op:
    """Routed experts of one layer: every token multiplies with `top_k` of them, and those `touched` are read.

    `matrices` is 3 with a gate, 2 without. `share` is the part of the tokens' choices that lies on this rank.
    """
    parameters = matrices * hidden * inner
    moved = touched * parameters * weights.bytes_each
    if activations is not None:
        moved += 2 * tokens * hidden * activations.bytes_each
    return Op(name, 2.0 * tokens * top_k * share * parameters, moved, precision)
