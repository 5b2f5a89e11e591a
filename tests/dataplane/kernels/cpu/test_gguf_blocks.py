"""Blocks of every kind against gguf's own dequantisation of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from dataplane.kernels.cpu import packing
from dataplane.kernels.packed import Format

FOUR_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K)
KINDS = (*FOUR_BITS, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q5_K, Kind.Q6_K)
HALVES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,),
    Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
}  # fmt: skip
"""Where a block has numbers of half precision."""


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any bytes are valid blocks but for the halves, which are numbers as weights have."""
    size, width = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // size, width), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = (rng.standard_normal(raw.shape[:2]) * 0.02).astype(np.float16)
        raw[..., at : at + 2] = scale.view(np.uint8).reshape(*raw.shape[:2], 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 16, 35])
def test_every_kind_holds_what_the_file_says(kind: Kind, rows: int) -> None:
    raw = random_blocks(kind, rows, 512, seed=rows)
    packed = packing.pack_blocks([(raw, kind)])
    expected = dequantize(raw, kind)
    found = packing.unpack(packed)
    assert packed.format is (Format.UINT4 if kind in FOUR_BITS else Format.INT8)
    assert (packed.rows, packed.columns) == expected.shape
    if kind in (Kind.Q4_K, Kind.Q5_K):
        # The file's scales are products; rounded to half precision each is off by 2⁻¹¹ at most, times q.
        products = np.abs(expected).reshape(rows, -1, 32).max(-1).repeat(32, axis=1)
        assert (np.abs(found - expected) <= products * 2**-9 + 1e-6).all()
    elif kind is Kind.Q6_K:
        # No block is worse than rounding to 127 steps of its largest number would be, with a scale of half precision.
        blocks = expected.reshape(rows, -1, 32)
        away = np.sqrt(((found.reshape(blocks.shape) - blocks) ** 2).mean(-1))
        scale = (np.abs(blocks).max(-1) / 127).astype(np.float16).astype(np.float32)
        plain = np.sqrt(((np.rint(blocks / scale[..., None]) * scale[..., None] - blocks) ** 2).mean(-1))
        assert (away <= plain * 1.001).all()
        assert away.mean() < 0.95 * plain.mean()
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_a_block_of_six_bits_whose_halves_agree_is_exact() -> None:
    raw = random_blocks(Kind.Q6_K, 8, 512).reshape(8, 2, -1)
    raw[..., 192:208:2] = raw[..., 193:208:2] = 5
    raw = raw.reshape(8, -1)
    np.testing.assert_allclose(
        packing.unpack(packing.pack_blocks([(raw, Kind.Q6_K)])), dequantize(raw, Kind.Q6_K), rtol=2**-10
    )


@pytest.mark.parametrize("other", KINDS, ids=lambda kind: kind.name)
def test_stacks_of_kinds(other: Kind) -> None:
    """q ‖ k ‖ v of different kinds are one matrix, of eight bits if one part needs them."""
    parts = [(random_blocks(kind, rows, 256, seed=rows), kind) for kind, rows in ((Kind.Q4_1, 20), (other, 13))]
    packed = packing.pack_blocks(parts)
    assert packed.format is (Format.UINT4 if other in FOUR_BITS else Format.INT8)
    expected = np.concatenate([packing.unpack(packing.pack_blocks([part])) for part in parts])
    np.testing.assert_allclose(packing.unpack(packed), expected, rtol=1e-6, atol=1e-8)


def test_what_cannot_be_held_is_refused() -> None:
    raw = random_blocks(Kind.Q8_0, 4, 64)
    with pytest.raises(ValueError, match="whole blocks of Q8_0"):
        packing.pack_blocks([(raw[:, :-1], Kind.Q8_0)])
    with pytest.raises(ValueError, match="columns cannot be stacked"):
        packing.pack_blocks([(raw, Kind.Q8_0), (random_blocks(Kind.Q8_0, 4, 32), Kind.Q8_0)])
    with pytest.raises(ValueError, match="F32 cannot be held"):
        packing.pack_blocks([(np.zeros((2, 128), np.uint8), Kind.F32)])
    for half in (np.float16(np.nan), np.float16(np.inf)):
        broken = raw.copy()
        broken[2, :2] = np.array([half]).view(np.uint8)
        with pytest.raises(ValueError, match="not finite"):
            packing.pack_blocks([(broken, Kind.Q8_0)])
    overflow = random_blocks(Kind.Q4_K, 1, 256)
    overflow[0, 0:2] = np.array([60000], np.float16).view(np.uint8)
    overflow[0, 4:8] = 63
    with pytest.raises(ValueError, match="not finite"):
        packing.pack_blocks([(overflow, Kind.Q4_K)])
