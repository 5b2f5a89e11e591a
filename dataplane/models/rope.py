"""Rotary position embedding (Su et al., RoFormer, §3.2), with the frequency scalings of long-context models.

Layer: model algorithm. Pairs are (i, i + d/2), as in Hugging Face checkpoints; the GGUF loader undoes the
interleaved order of llama.cpp, so that one form exists here. An engine has one longest sequence, `positions`, and
scalings that depend on a length take that one: keys of a sequence are never turned by two rules.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dataplane.kernels import ops
from dataplane.models.shape import ModelShape, RopeScaling


def inverse_frequencies(theta: float, dim: int, scaling: RopeScaling | None, context: int, positions: int) -> Tensor:
    """θ^(−2i/d) for each pair [d/2], scaled for sequences of up to `positions` by a model made for `context`."""
    powers = _powers(theta, dim)
    if scaling is None:
        return 1.0 / powers
    match scaling.kind:
        case "linear":
            return 1.0 / (scaling.factor * powers)
        case "dynamic":
            return 1.0 / _powers(theta * _ntk(scaling.factor, dim, context, positions), dim)
        case "yarn":
            return _yarn(powers, scaling, theta, dim)
        case "llama3":
            return _llama3(1.0 / powers, scaling)
        case _:
            short = positions <= scaling.original_context and bool(scaling.short_factors)
            factors = scaling.short_factors if short else scaling.long_factors
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)


def _powers(theta: float, dim: int) -> Tensor:
    return torch.pow(theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _ntk(factor: float, dim: int, context: int, positions: int) -> float:
    """What the base is multiplied by for sequences of `positions` tokens: 1 up to `context`."""
    stretch = factor * max(positions, context) / context - (factor - 1)
    return float(stretch ** (dim / (dim - 2)))


def _yarn(powers: Tensor, scaling: RopeScaling, theta: float, dim: int) -> Tensor:
    """NTK by parts (Peng et al. 2023, §3.2): pairs that turn often are kept, those that turn less than once are
    divided by the factor, those between are blended."""

    def pair_of(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return divided / (scaling.factor * powers) + (1 - divided) / powers


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended linearly."""
    wavelength = 2 * math.pi / frequencies
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    blend = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    middle = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelength > longest, frequencies / scaling.factor, frequencies)
    between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(between, middle, scaled)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin [positions, r], halves alike, looked up once a step and applied in every layer.

    `local` makes those of layers with a window, which have a base of their own and no scaling.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, positions: int, *, local: bool = False) -> None:
        super().__init__()
        self.local = local
        theta, scaling = shape.rope_theta, shape.rope_scaling
        if local:
            theta, scaling = shape.local_rope_theta or theta, None
        frequencies = inverse_frequencies(theta, shape.turned, scaling, shape.context, positions)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        factor = scaling.attention_factor if scaling else 1.0
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)

    def at(self, positions: Tensor) -> ops.Turn:
        """The angles of tokens at `positions` [T]."""
        return ops.turn(positions, self.cos, self.sin)
