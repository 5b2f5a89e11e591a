"""Products in every format against float64, and alike to the bit in any batch, thread count and instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.kernels.cpu import packing
from dataplane.kernels.cpu.executor import CpuExecutor
from dataplane.kernels.packed import Format, Packed
from tests.dataplane.kernels.cpu.conftest import TIERS, Executors
from tests.dataplane.kernels.cpu.programs import Floats, head, multiply, noise
from tests.dataplane.kernels.cpu.test_gguf_blocks import Kind, random_blocks

SIZES = ((1, 32), (16, 64), (40, 96), (100, 576), (33, 1536))
ROWS = (1, 2, 3, 5, 8, 9, 31, 130, 257)


def packed_in(form: str, rows: int, columns: int) -> Packed:
    w = noise(rows, columns, seed=rows) * 0.1
    if form == "INT8 with minima":
        return packing.pack_blocks([(random_blocks(Kind.Q5_1, rows, columns), Kind.Q5_1)])
    return {"FLOAT32": packing.pack_float32, "INT8": packing.pack_int8, "UINT4": packing.pack_int4}[form](w)


FORMS = ("FLOAT32", "INT8", "INT8 with minima", "UINT4")


def as_multiplied(x: Floats, form: Format) -> np.ndarray:
    """The activations that the kernel multiplies with: of a quantised product rounded to 127 steps per block of 32."""
    if form is Format.FLOAT32:
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, 32)
    peak = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    rounded: np.ndarray = np.rint(blocks * inverse).astype(np.float64) * (peak / np.float32(127))
    return rounded.reshape(x.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_it_is_the_product_of_what_is_packed(executor: CpuExecutor, form: str, rows: int, columns: int) -> None:
    packed, bias = packed_in(form, rows, columns), noise(rows, seed=9)
    weights = packing.unpack(packed).astype(np.float64)
    loaded = head(executor, packed, bias)
    for n in ROWS:
        x = noise(n, columns, seed=n)
        x[0, :32] = 0.0
        expected = as_multiplied(x, packed.format) @ weights.T + bias
        size = np.abs(as_multiplied(x, packed.format)) @ np.abs(weights.T) + np.abs(bias)
        found = multiply(loaded, x)
        assert (np.abs(found - expected) <= 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("columns", [1, 7, 100, 300])
def test_floats_of_any_number_of_columns(executor: CpuExecutor, columns: int) -> None:
    w, x = noise(37, columns), noise(14, columns, seed=1)
    found = multiply(head(executor, packing.pack_float32(w)), x)
    np.testing.assert_allclose(found, x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_row_is_the_same_to_the_bit_in_any_batch_and_on_any_threads(
    executors: Executors, tier: str, form: str
) -> None:
    packed = packed_in(form, 200, 576)
    x = noise(257, 576, seed=3)
    everything = multiply(head(executors(tier, 3), packed), x)
    for threads in (1, 2):
        loaded = head(executors(tier, threads), packed)
        np.testing.assert_array_equal(multiply(loaded, x), everything)
        for start, count in ((0, 1), (17, 1), (256, 1), (3, 2), (100, 5), (11, 13), (60, 128)):
            np.testing.assert_array_equal(multiply(loaded, x[start : start + count]), everything[start : start + count])


@pytest.mark.parametrize("form", FORMS)
def test_instruction_sets_with_a_fused_product_agree_to_the_bit(executors: Executors, form: str) -> None:
    packed, x = packed_in(form, 100, 576), noise(40, 576)
    np.testing.assert_array_equal(
        multiply(head(executors("avx2", 2), packed), x), multiply(head(executors("avx512", 2), packed), x)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(executor: CpuExecutor, form: str, broken: float) -> None:
    loaded = head(executor, packed_in(form, 40, 96))
    x = noise(6, 96)
    clean = multiply(loaded, x)
    x[2, 50] = broken
    found = multiply(loaded, x)
    assert not np.isfinite(found[2]).any()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(clean, 2, 0))


def test_the_largest_numbers_do_not_overflow(executor: CpuExecutor) -> None:
    """All products at their extremes, where a sum in 16 bits would wrap or saturate first."""
    one = np.array([1], dtype=np.float16).view(np.uint8)
    blocks = {
        Kind.Q4_0: np.concatenate([one, np.full(16, 255, np.uint8)]),
        Kind.Q8_0: np.concatenate([one, np.full(32, 128, np.uint8)]),
    }
    for kind, block in blocks.items():
        packed = packing.pack_blocks([(np.tile(block, (16, 2)), kind)])
        for sign in (1.0, -1.0):
            x = np.full((9, 64), sign, dtype=np.float32)
            expected = x.astype(np.float64) @ packing.unpack(packed).T.astype(np.float64)
            np.testing.assert_allclose(multiply(head(executor, packed), x), expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_random_sizes(executors: Executors, seed: int) -> None:
    rng = np.random.default_rng(seed)
    form = FORMS[seed % 4]
    packed = packed_in(form, int(rng.integers(1, 300)), 32 * int(rng.integers(1, 20)))
    x = noise(int(rng.integers(1, 290)), packed.columns, seed=seed)
    expected = as_multiplied(x, packed.format) @ packing.unpack(packed).astype(np.float64).T
    found = multiply(head(executors(TIERS[seed % 2], int(rng.integers(1, 4))), packed), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
