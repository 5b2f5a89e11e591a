"""How the numbers of a packed matrix lie in memory, as `source/linear.h` reads them.

Layer: kernel. A matrix [rows, columns] is cut into panels of sixteen rows (outputs), the last filled up with zeros:

    FLOAT32   values [panels][columns][16 rows]
    INT8      values [panels][blocks][8][16 rows][4 columns], of 32 columns each
    UINT4     values [panels][blocks][4][16 rows][4 columns], columns 4g… in the low and 16 + 4g… in the high nibbles
              scales [panels][blocks][16 rows] half precision, beside each sixteen as many minima, if there are any
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataplane.kernels.packed import BLOCK, Format, Packed

PANEL = 16
ALIGNMENT = 64

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class Quantised(NamedTuple):
    """w = scales · q + minima. q [rows, columns] of bytes as the format has them; scales and minima [rows, blocks].

    Of UINT4 q may also be [rows, columns / 2], each block of 32 columns as sixteen bytes that hold column i in the low
    and 16 + i in the high nibble.
    """

    q: NDArray[np.int8] | Bytes
    scales: Halves
    minima: Halves | None


def to_half(x: Floats) -> Halves:
    """What is too large becomes infinite, which is refused with everything that is not finite."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def nbytes(form: Format, rows: int, columns: int, *, minima: bool | None = None) -> int:
    """Bytes of a packed matrix. `minima`: whether an INT8 one has any (none unless said)."""
    padded = -(-rows // PANEL) * PANEL
    if form is Format.FLOAT32:
        return padded * columns * 4
    with_minima = form is Format.UINT4 if minima is None else minima
    halves = padded * (columns // BLOCK) * (2 if with_minima else 1)
    return padded * columns // (2 if form is Format.UINT4 else 1) + halves * 2


def has_minima(packed: Packed) -> bool:
    return packed.scales.nbytes == 4 * -(-packed.rows // PANEL) * PANEL * (packed.columns // BLOCK)


def arrange_floats(w: Floats) -> Packed:
    """w [rows, columns], of any number of columns."""
    rows, columns = w.shape
    values = aligned(-(-rows // PANEL) * PANEL * columns * 4)
    panels = values.view(np.float32).reshape(-1, columns, PANEL)
    whole = rows // PANEL
    panels[:whole] = w[: whole * PANEL].reshape(whole, PANEL, columns).transpose(0, 2, 1)
    if whole < len(panels):
        panels[whole] = 0.0
        panels[whole, :, : rows - whole * PANEL] = w[whole * PANEL :].T
    return Packed(Format.FLOAT32, rows, columns, values, aligned(0))


def arrange(form: Format, parts: list[Quantised]) -> Packed:
    """One matrix of parts stacked by rows. Of parts with minima and without, those without get zeros."""
    rows = sum(len(part.q) for part in parts)
    blocks = parts[0].scales.shape[1]
    padded, words = -(-rows // PANEL) * PANEL, 4 if form is Format.UINT4 else 8
    values = aligned(padded * blocks * words * 4)
    words_of = np.zeros((padded, blocks, words), dtype=np.uint32)
    minima = any(part.minima is not None for part in parts)
    scales = aligned(padded * blocks * 2 * (1 + minima))
    halves = np.zeros((padded, blocks, 1 + minima), dtype=np.float16)
    at = 0
    for part in parts:
        end = at + len(part.q)
        words_of[at:end] = _words(form, part.q, blocks)
        halves[at:end, :, 0] = part.scales
        if part.minima is not None:
            halves[at:end, :, 1] = part.minima
        at = end
    values.view(np.uint32).reshape(-1, blocks, words, PANEL)[...] = words_of.reshape(
        -1, PANEL, blocks, words
    ).transpose(0, 2, 3, 1)
    scales.view(np.float16).reshape(-1, blocks, 1 + minima, PANEL)[...] = halves.reshape(
        -1, PANEL, blocks, 1 + minima
    ).transpose(0, 2, 3, 1)
    return Packed(form, rows, blocks * BLOCK, values, scales)


def spread(packed: Packed) -> Floats:
    """The matrix [rows, columns] that the kernels multiply with."""
    if packed.format is Format.FLOAT32:
        panels = packed.values.view(np.float32).reshape(-1, packed.columns, PANEL)
        return np.ascontiguousarray(panels.transpose(0, 2, 1).reshape(-1, packed.columns)[: packed.rows])
    blocks, words = packed.columns // BLOCK, 4 if packed.format is Format.UINT4 else 8
    stored = packed.values.view(np.uint32).reshape(-1, blocks, words, PANEL).transpose(0, 3, 1, 2)
    columns = np.ascontiguousarray(stored).view(np.uint8)
    if packed.format is Format.UINT4:
        q = np.concatenate([columns & 15, columns >> 4], axis=-1).astype(np.float32)
    else:
        q = columns.view(np.int8).astype(np.float32)
    minima = has_minima(packed)
    halves = packed.scales.view(np.float16).reshape(-1, blocks, 1 + minima, PANEL).transpose(0, 3, 1, 2)
    halves = halves.astype(np.float32)
    q *= halves[..., :1]
    if minima:
        q += halves[..., 1:]
    return np.ascontiguousarray(q.reshape(-1, packed.columns)[: packed.rows])


def aligned(size: int) -> Bytes:
    """Fresh bytes on the boundary of a cache line."""
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _words(form: Format, q: NDArray[np.int8] | Bytes, blocks: int) -> NDArray[np.uint32]:
    """Four columns, or of UINT4 twice four, in a word: [rows, blocks, words]."""
    if form is Format.UINT4 and q.shape[1] == blocks * BLOCK:
        halves = q.view(np.uint8).reshape(len(q), blocks, 2, BLOCK // 2)
        q = halves[:, :, 0] | halves[:, :, 1] << 4
    return np.ascontiguousarray(q).reshape(len(q), blocks, -1).view(np.uint32)
