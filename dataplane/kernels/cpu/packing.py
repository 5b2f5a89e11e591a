"""Matrices into the forms that CPU kernels multiply with, and back.

Layer: kernel. Torch-free. Scales and minima are of half precision on every machine, so that a packed matrix means the
same everywhere; q is chosen for the rounded ones. What is not finite, or would not be in half precision, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gguf.constants import GGMLQuantizationType

from dataplane.kernels.cpu import layout
from dataplane.kernels.cpu.gguf_blocks import FOUR_BITS, columns_of, quantised
from dataplane.kernels.cpu.layout import Bytes, Floats, Halves, Quantised, nbytes, to_half
from dataplane.kernels.packed import BLOCK, Format, Packed

__all__ = ["nbytes", "pack_blocks", "pack_float32", "pack_int4", "pack_int8", "unpack"]

PIECE = 1 << 17
"""Numbers that are quantised at a time, so that what is made of them stays in the cache."""

SHRINKS = (1.0, 0.92, 0.84)
"""Parts of a group's whole range that the search for scale and minimum begins from."""

TINY = 1e-30
"""A scale that is not told from 0."""

ROUNDS = 3
"""Times that scale and minimum are fitted to q and q to them."""


def pack_float32(w: Floats) -> Packed:
    """w [rows, columns] as it is. Raises ValueError if a number is not finite."""
    _check(w)
    return layout.arrange_floats(w)


def pack_int8(w: Floats) -> Packed:
    """w [rows, columns] with a scale per row and block of 32 columns, symmetric.

    Raises ValueError as `pack_float32`, and for columns that are not whole blocks.
    """
    _check(w, BLOCK)
    return _finite(layout.arrange(Format.INT8, [_int8(piece.reshape(len(piece), -1, BLOCK)) for piece in _pieces(w)]))


def pack_int4(w: Floats, group: int = 128) -> Packed:
    """w [rows, columns] with scale and minimum per row and `group` columns (of the last group, those that are left).

    They are the best of a small search for the least squared error. Raises ValueError as `pack_int8`, and for a group
    that is not whole blocks.
    """
    _check(w, BLOCK)
    if group < BLOCK or group % BLOCK:
        raise ValueError(f"a group of {group} columns is not whole blocks of {BLOCK}")
    whole = w.shape[1] // group * group
    spans = [
        (at, end, size) for at, end, size in ((0, whole, group), (whole, w.shape[1], w.shape[1] - whole)) if at < end
    ]
    parts = []
    for piece in _pieces(w):
        done = [_int4(piece[:, at:end].reshape(len(piece), -1, size)) for at, end, size in spans]
        q, scales, minima = (np.concatenate(part, axis=1) for part in zip(*done, strict=True))
        parts.append(Quantised(q, scales, minima))
    return _finite(layout.arrange(Format.UINT4, parts))


def pack_blocks(parts: Sequence[tuple[Bytes, GGMLQuantizationType]]) -> Packed:
    """Matrices of a GGUF file, each raw [rows, bytes] of its kind, stacked by rows.

    UINT4 if all are of four bits, INT8 if one is not. Raises ValueError for a kind without integers, rows that are not
    whole blocks or not equally wide, and scales that are not finite.
    """
    widths = {columns_of(raw, kind) for raw, kind in parts}
    if len(widths) != 1:
        raise ValueError(f"matrices of {sorted(widths)} columns cannot be stacked")
    form = Format.UINT4 if all(kind in FOUR_BITS for _, kind in parts) else Format.INT8
    return _finite(layout.arrange(form, [quantised(raw, kind, form) for raw, kind in parts]))


def unpack(packed: Packed) -> Floats:
    """The matrix [rows, columns] that the kernels truly multiply with."""
    return layout.spread(packed)


def _pieces(w: Floats) -> list[Floats]:
    rows = max(1, PIECE // w.shape[1])
    return [w[at : at + rows] for at in range(0, len(w), rows)]


def _check(w: Floats, block: int = 1) -> None:
    if w.ndim != 2 or w.dtype != np.float32:
        raise ValueError(f"a matrix of float32 was expected, not {w.dtype} {w.shape}")
    if w.shape[1] % block:
        raise ValueError(f"{w.shape[1]} columns are not whole blocks of {block}, which only FLOAT32 can hold")
    for piece in _pieces(w):
        if not np.isfinite(piece).all():
            raise ValueError("the matrix has numbers that are not finite")


def _finite(packed: Packed) -> Packed:
    if not np.isfinite(packed.scales.view(np.float16)).all():
        raise ValueError("the matrix has scales or minima that are not finite numbers of half precision")
    return packed


def _int8(w: Floats) -> Quantised:
    """w [rows, blocks, 32]."""
    scale = to_half(np.maximum(w.max(axis=-1), -w.min(axis=-1)) * np.float32(1 / 127))
    wide = scale.astype(np.float32)[..., None]
    q = np.rint(w * np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0))
    return Quantised(np.clip(q, -127, 127, out=q).astype(np.int8).reshape(len(w), -1), scale, None)


def _int4(w: Floats) -> tuple[Bytes, Halves, Halves]:
    """q [rows, columns], scales and minima [rows, blocks] of w [rows, groups, size].

    From each start, q is rounded for scale and minimum and these are fitted to q by least squares, in turn.
    """
    low, high = w.min(axis=-1, keepdims=True), w.max(axis=-1, keepdims=True)
    mean = w.mean(axis=-1, keepdims=True)
    least = np.full(low.shape, np.inf, dtype=np.float32)
    best_scale, best_minimum = np.zeros_like(low), low.copy()
    for shrink in SHRINKS:
        scale = (high - low) * np.float32(shrink / 15)
        minimum = low + (high - low) * np.float32((1 - shrink) / 2)
        for _ in range(ROUNDS):
            q = _levels(w, scale, minimum)
            centre = q.mean(axis=-1, keepdims=True)
            spread = q - centre
            square = (spread * spread).sum(-1, keepdims=True)
            product = (spread * w).sum(-1, keepdims=True)
            scale = np.divide(product, square, out=np.zeros_like(scale), where=square > 0)
            minimum = mean - scale * centre
        wide_scale, wide_minimum = to_half(scale).astype(np.float32), to_half(minimum).astype(np.float32)
        away = _levels(w, wide_scale, wide_minimum) * wide_scale + wide_minimum - w
        error = (away * away).sum(-1, keepdims=True)
        better = error < least
        least = np.where(better, error, least)
        best_scale, best_minimum = (
            np.where(better, wide_scale, best_scale),
            np.where(better, wide_minimum, best_minimum),
        )
    levels = _levels(w, best_scale, best_minimum).astype(np.uint8).reshape(len(w), -1)
    blocks = w.shape[2] // BLOCK
    scales, minima = (to_half(x[..., 0]).repeat(blocks, axis=1) for x in (best_scale, best_minimum))
    return levels, scales, minima


def _levels(w: Floats, scale: Floats, minimum: Floats) -> Floats:
    """q in 0…15 nearest to (w − minimum) / scale; 0 where the scale is 0."""
    q = (w - minimum) * np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > TINY)
    return np.clip(np.rint(q, out=q), 0, 15, out=q)
