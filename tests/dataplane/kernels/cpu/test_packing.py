"""What packing keeps of a matrix, what it costs, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.kernels.cpu import packing
from dataplane.kernels.packed import Format
from tests.dataplane.kernels.cpu.programs import noise

SIZES = ((1, 32), (16, 128), (35, 576), (100, 96))


def error(w: np.ndarray, packed: packing.Packed) -> float:
    return float(((packing.unpack(packed) - w) ** 2).mean())


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_unpacked_is_what_was_packed_within_its_steps(rows: int, columns: int) -> None:
    w = noise(rows, columns)
    np.testing.assert_array_equal(packing.unpack(packing.pack_float32(w)), w)
    peak = np.abs(w).reshape(rows, -1, 32).max(-1).repeat(32, axis=1)
    eight = packing.unpack(packing.pack_int8(w))
    assert (np.abs(eight - w) <= peak / 127 * (0.5 + 127 * 2**-11) + 1e-7).all()
    four = packing.pack_int4(w, group=64)
    assert error(w, four) < (8 / 15) ** 2 / 12


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_bytes_are_known_beforehand(rows: int, columns: int) -> None:
    w = noise(rows, columns)
    for packed in (packing.pack_float32(w), packing.pack_int8(w), packing.pack_int4(w)):
        assert packed.nbytes == packing.nbytes(packed.format, rows, columns)
        assert packed.values.ctypes.data % 64 == 0
        assert not packed.scales.size or packed.scales.ctypes.data % 64 == 0


def test_four_bits_are_better_than_the_whole_range_in_fifteen_steps() -> None:
    w = noise(64, 640)
    w[:, ::97] *= 4  # outliers, as weights have
    groups = w.reshape(64, -1, 128)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (high - low) / 15
    plain = np.rint((groups - low) / scale) * scale + low
    assert error(w, packing.pack_int4(w)) < 0.9 * float(((plain - groups) ** 2).mean())


def test_a_last_group_may_be_shorter() -> None:
    w = noise(20, 576)
    packed = packing.pack_int4(w, group=128)
    tail = packing.pack_int4(np.ascontiguousarray(w[:, 512:]), group=64)
    np.testing.assert_array_equal(packing.unpack(packed)[:, 512:], packing.unpack(tail))


@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 1e-30, 1e-45])
def test_constant_and_tiny_matrices(value: float) -> None:
    w = np.full((17, 64), value, dtype=np.float32)
    for packed in (packing.pack_int8(w), packing.pack_int4(w)):
        assert np.abs(packing.unpack(packed) - w).max() <= abs(value) * 2e-3 + 1e-7


def test_a_matrix_that_a_format_cannot_hold_is_refused() -> None:
    for broken in (np.nan, np.inf):
        w = noise(4, 64)
        w[3, 9] = broken
        for pack in (packing.pack_float32, packing.pack_int8, packing.pack_int4):
            with pytest.raises(ValueError, match="not finite"):
                pack(w)
    for pack in (packing.pack_int8, packing.pack_int4):
        with pytest.raises(ValueError, match="40 columns are not whole blocks of 32, which only FLOAT32 can hold"):
            pack(noise(4, 40))
    with pytest.raises(ValueError, match="scales or minima"):
        packing.pack_int8(np.full((2, 32), 3e38, dtype=np.float32))
    with pytest.raises(ValueError, match="a group of 48"):
        packing.pack_int4(noise(4, 96), group=48)
    with pytest.raises(ValueError, match="float64"):
        packing.pack_float32(noise(4, 32).astype(np.float64))  # type: ignore[arg-type]
    assert packing.pack_float32(noise(4, 40)).format is Format.FLOAT32
