"""Weights in the forms that CPU kernels multiply with.

Layer: kernel. Plain data, torch-free: which numbers a matrix holds and in which format, never how it came to be.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Columns that share a scale, of weights and of activations alike."""


class Format(enum.IntEnum):
    """How the numbers of a matrix are stored. w is the weight, q what is stored, per row and block of `BLOCK` columns:
    w = scale · q + minimum."""

    FLOAT32 = 0
    INT8 = 1
    """q in −128…127."""
    UINT4 = 2
    """q in 0…15."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [rows, columns], rearranged for the kernels.

    `values` are its numbers and `scales` its scales and minima (none for FLOAT32), both aligned to 64 bytes and in the
    order that `kernels.cpu.packing` alone knows. `columns` is a multiple of `BLOCK` but for FLOAT32.
    """

    format: Format
    rows: int
    columns: int
    values: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes
