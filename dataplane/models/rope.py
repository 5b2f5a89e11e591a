"""Rotary position embedding (Su et al., RoFormer, §3.2), with the frequency scalings of long-context models.

Layer: model algorithm. Pairs are (i, i + d/2), as in Hugging Face checkpoints; the GGUF loader undoes the
interleaved order of llama.cpp, so that one form exists here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dataplane.models.shape import ModelShape, RopeScaling


def inverse_frequencies(shape: ModelShape, factors: Tensor | None = None) -> Tensor:
    """θ^(−2i/d) for each pair, scaled; `factors` [d/2] divide each frequency (GGUF's `rope_freqs.weight`)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    if factors is not None:
        return frequencies / factors
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    return frequencies / scaling.factor if scaling.kind == "linear" else _llama3(frequencies, scaling)


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
    """Tables of cos and sin [positions, d], gathered once a step and applied in every layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, positions: int) -> None:
        super().__init__()
        self.positions = positions
        self.set_frequencies(inverse_frequencies(shape))

    def set_frequencies(self, frequencies: Tensor) -> None:
        """Rebuild the tables from per-pair frequencies [d/2]."""
        angles = torch.outer(torch.arange(self.positions, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, d] for positions [T]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x [T, heads, d]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
