"""The blocks of a GGUF file as quantised numbers, without going through floats.

Layer: kernel. Formats: ggml `ggml-common.h` and `ggml-quants.c`. Every kind but Q6_K keeps its own numbers; scales and
minima that the file has as products are rounded to half precision once. Q6_K has a scale per 16 columns and is
re-expressed with one per 32 and eight bits instead of six.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from dataplane.kernels.cpu.layout import Bytes, Floats, Halves, Quantised, to_half
from dataplane.kernels.packed import BLOCK, Format

Kind = GGMLQuantizationType
SUPER = 256
"""Columns of a super-block of the K kinds."""

MULTIPLES = (1, 2, 3, 4, 5, 6)
"""Parts of a Q6_K scale that are tried as the scale of a block."""


def quantised(raw: Bytes, kind: Kind, form: Format) -> Quantised:
    """The matrix in rows of whole blocks, raw [rows, bytes], as `form` holds it: UINT4 only of kinds of four bits.

    Raises ValueError for a kind that has no such form and for rows that are not whole blocks.
    """
    _, width = GGML_QUANT_SIZES[kind]
    if kind not in _READERS or (form is Format.UINT4 and kind not in FOUR_BITS):
        raise ValueError(f"{kind.name} cannot be held as {form.name}")
    if raw.ndim != 2 or raw.shape[1] % width:
        raise ValueError(f"rows of {raw.shape[-1]} bytes are not whole blocks of {kind.name}, which take {width} each")
    return _READERS[kind](np.ascontiguousarray(raw).reshape(len(raw), -1, width), form)


def columns_of(raw: Bytes, kind: Kind) -> int:
    size, width = GGML_QUANT_SIZES[kind]
    return int(raw.shape[1] // width * size)


def _half(blocks: Bytes, at: int) -> Halves:
    """The number of half precision at byte `at` of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """[…, 16] bytes → […, 32] of four bits, the low ones first."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _rows(q: NDArray[np.int8] | Bytes) -> NDArray[np.int8] | Bytes:
    return q.reshape(len(q), -1)


def _q4_0(blocks: Bytes, form: Format) -> Quantised:
    scale, packed = _half(blocks, 0), blocks[..., 2:]
    if form is Format.UINT4:
        return Quantised(_rows(packed), scale, (scale * np.float16(-8)).astype(np.float16))
    return Quantised(_rows(_nibbles(packed).view(np.int8) - np.int8(8)), scale, None)


def _q4_1(blocks: Bytes, form: Format) -> Quantised:
    packed = blocks[..., 4:]
    return Quantised(_rows(packed if form is Format.UINT4 else _nibbles(packed)), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the four bytes at `at` as sixteens, [rows, blocks, 32]."""
    return np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes, form: Format) -> Quantised:
    q = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)).view(np.int8) - np.int8(16)
    return Quantised(_rows(q), _half(blocks, 0), None)


def _q5_1(blocks: Bytes, form: Format) -> Quantised:
    q = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return Quantised(_rows(q), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes, form: Format) -> Quantised:
    return Quantised(_rows(blocks[..., 2:].view(np.int8)), _half(blocks, 0), None)


def _six_bits(blocks: Bytes) -> tuple[Halves, Halves]:
    """Scales d · s and minima −dmin · m of the eight sub-blocks, [rows, super-blocks · 8].

    Twelve bytes hold s and m of six bits: those of sub-blocks 0…3 in bytes 0…3 and 4…7, of 4…7 their low nibbles in
    bytes 8…11 and their upper two bits in the upper two of bytes 0…7.
    """
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    s = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1).astype(np.float32)
    m = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1).astype(np.float32)
    s *= _half(blocks, 0)[..., None].astype(np.float32)
    m *= -_half(blocks, 2)[..., None].astype(np.float32)
    return to_half(s).reshape(len(s), -1), to_half(m).reshape(len(m), -1)


def _four_bits_of_super(blocks: Bytes, at: int) -> Bytes:
    """[rows, super-blocks, 8, 32] of 128 bytes; of each 32 the low nibbles are one sub-block, the high the next."""
    packed = blocks[..., at : at + 128].reshape(*blocks.shape[:2], 4, 1, BLOCK)
    return np.concatenate([packed & 15, packed >> 4], axis=3).reshape(*blocks.shape[:2], 8, BLOCK)


def _q4_k(blocks: Bytes, form: Format) -> Quantised:
    return Quantised(_rows(_four_bits_of_super(blocks, 16)), *_six_bits(blocks))


def _q5_k(blocks: Bytes, form: Format) -> Quantised:
    bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [rows, super-blocks, 32, 8]
    q = _four_bits_of_super(blocks, 48) | bits.swapaxes(-1, -2) << 4
    return Quantised(_rows(q), *_six_bits(blocks))


def _q6_k(blocks: Bytes, form: Format) -> Quantised:
    """Of each of two halves of 128 columns: 64 bytes of low nibbles and 32 of upper pairs of bits."""
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=3).reshape(*shape, 2, 4, 32)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    upper = high >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    q = (low | upper << 4).view(np.int8) - np.int8(32)  # [rows, super-blocks, 2, 4, 32]
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)[..., None].astype(np.float32)
    return _one_scale(q.reshape(len(q), -1, 2, 16), scales.reshape(len(q), -1, 2))


def _one_scale(q: NDArray[np.int8], scales: Floats) -> Quantised:
    """Two scales [rows, blocks, 2] of sixteen columns each, q [rows, blocks, 2, 16], as one and eight bits.

    Tried are the scale that uses all eight bits, and fractions of either scale, with which its half stays exact.
    """
    w = q.astype(np.float32) * scales[..., None]
    sizes: Floats = np.abs(scales)
    peak: Floats = np.abs(w).max(axis=(2, 3))
    best = to_half(peak / np.float32(127))
    least = _error(w, best)
    for part in MULTIPLES:
        for half in (0, 1):
            scale = to_half(sizes[..., half] / np.float32(part))
            error = np.where(scale.astype(np.float32) * 127.5 >= peak, _error(w, scale), np.inf)
            better = error < least
            best, least = np.where(better, scale, best), np.where(better, error, least)
    return Quantised(_rows(_nearest(w, best).astype(np.int8)), best, None)


def _nearest(w: Floats, scale: Halves) -> Floats:
    wide = scale.astype(np.float32)[..., None, None]
    with np.errstate(invalid="ignore"):  # of what is not finite, which is refused by its scale
        return np.clip(np.rint(np.divide(w, wide, out=np.zeros_like(w), where=wide > 0)), -127, 127)


def _error(w: Floats, scale: Halves) -> Floats:
    away = _nearest(w, scale) * scale.astype(np.float32)[..., None, None] - w
    error: Floats = np.einsum("rbhc,rbhc->rb", away, away)
    return error


_READERS: dict[Kind, Callable[[Bytes, Format], Quantised]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q4_K: _q4_k,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.Q8_0: _q8_0,
}

FOUR_BITS = frozenset({Kind.Q4_0, Kind.Q4_1, Kind.Q4_K})
KINDS = frozenset(_READERS)
"""Kinds that `quantised` reads."""
