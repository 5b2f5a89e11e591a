"""Each operation on a row by itself against its torch counterpart, at widths of whole vectors and others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dataplane.kernels import ops
from dataplane.kernels import program as ir
from dataplane.kernels.cpu import packing
from dataplane.kernels.cpu.executor import CpuExecutor
from tests.dataplane.kernels.cpu.programs import Floats, apply, no_step, noise, whole

WIDTHS = (1, 15, 16, 48, 100, 576)
ROWS = (1, 7, 300)


def close(found: Floats, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=5e-6)


def torch_of(x: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", ROWS)
def test_sums_products_and_norms(executor: CpuExecutor, width: int, n: int) -> None:
    x, y, out = whole(0, width), whole(width, width), whole(2 * width, width)
    a, b, step = noise(n, width), noise(n, width, seed=1), no_step(n)
    weight, bias = noise(width, seed=2), noise(width, seed=3)
    close(apply(executor, ir.Add(out, x, y), {x: a, y: b}, step), torch_of(a + b))
    close(apply(executor, ir.Scale(out, x, 0.37), {x: a}, step), ops.scale(torch_of(a), 0.37))
    close(apply(executor, ir.Softcap(out, x, 2.5), {x: a * 3}, step), ops.softcap(torch_of(a * 3), 2.5))
    close(apply(executor, ir.GeluTanh(out, x), {x: a * 3}, step), ops.gelu_tanh(torch_of(a * 3)))
    close(
        apply(executor, ir.RmsNorm(out, x, weight, 1e-5), {x: a}, step),
        ops.rms_norm(torch_of(a), torch_of(weight), 1e-5),
    )
    if width > 1:
        close(
            apply(executor, ir.LayerNorm(out, x, weight, bias, 1e-5), {x: a + 3}, step),
            ops.layer_norm(torch_of(a + 3), torch_of(weight), torch_of(bias), 1e-5),
        )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", ROWS)
def test_gated_products(executor: CpuExecutor, width: int, n: int) -> None:
    x, out = whole(0, 2 * width), whole(2 * width, width)
    both = noise(n, 2 * width) * 4
    close(apply(executor, ir.SiluMul(out, x), {x: both}, no_step(n)), ops.silu_mul(torch_of(both)))
    close(apply(executor, ir.GeluTanhMul(out, x), {x: both}, no_step(n)), ops.gelu_tanh_mul(torch_of(both)))


@pytest.mark.parametrize(("dim", "turned"), [(64, 64), (16, 16), (8, 8), (80, 32), (96, 96), (256, 256), (22, 6)])
def test_rotation(executor: CpuExecutor, dim: int, turned: int) -> None:
    n, heads, limit = 9, 3, 50
    angles = np.tile(noise(limit, turned // 2), 2) * 3
    cos, sin = np.cos(angles), np.sin(angles)
    positions = np.random.default_rng(1).integers(0, limit, n)
    x, out, values = whole(0, heads * dim), whole(heads * dim, heads * dim), noise(n, heads * dim, seed=1)
    expected = ops.rotate(torch_of(values), ops.turn(torch.from_numpy(positions), torch_of(cos), torch_of(sin)), dim)
    for target in (out, x):
        close(apply(executor, ir.Rotate(target, x, cos, sin, dim), {x: values}, no_step(n, positions)), expected)


def test_a_norm_takes_each_head_by_itself_and_may_write_where_it_reads(executor: CpuExecutor) -> None:
    inside = ir.Columns(0, 100, 10, 72)
    x, weight = noise(5, 72), noise(24, seed=1)
    found = apply(executor, ir.RmsNorm(inside, inside, weight, 1e-6), {inside: x}, no_step(5))
    close(found, ops.rms_norm(torch_of(x), torch_of(weight), 1e-6))


@pytest.mark.parametrize("columns", [32, 96, 576])
def test_embeddings_are_rows_of_the_packed_table(executor: CpuExecutor, columns: int) -> None:
    w = noise(70, columns)
    ids = np.array([69, 0, 15, 16, 17, 33, 64, 3], dtype=np.int64)
    for packed in (packing.pack_float32(w), packing.pack_int8(w), packing.pack_int4(w)):
        found = apply(executor, ir.Embed(whole(0, columns), packed), {}, no_step(len(ids), ids=ids))
        np.testing.assert_array_equal(found, packing.unpack(packed)[ids])


def test_functions_over_their_whole_range(executor: CpuExecutor) -> None:
    """Against float64: silu and the soft-cap rest on exp and tanh, which must hold near 0 and at the ends."""
    grid = np.concatenate([np.linspace(-110, 110, 20000), np.logspace(-30, 2, 4000), -np.logspace(-30, 2, 4000)])
    values = grid.astype(np.float32)[None]
    width = values.shape[1]
    x, out = whole(0, width), whole(width, width)
    found = apply(executor, ir.Softcap(out, x, 1.0), {x: values}, no_step(1))
    np.testing.assert_allclose(found, np.tanh(values.astype(np.float64)), rtol=4e-7, atol=1e-37)
    gate, half = whole(0, 2 * width), whole(2 * width, width)
    found = apply(executor, ir.SiluMul(half, gate), {gate: np.hstack([values, np.ones_like(values)])}, no_step(1))
    wide = values.astype(np.float64)
    np.testing.assert_allclose(found, wide / (1 + np.exp(-wide)), rtol=8e-7, atol=1e-36)


def test_what_is_not_a_number_stays_so(executor: CpuExecutor) -> None:
    values = np.array([[math.nan, 1.0, math.inf, -math.inf]], dtype=np.float32)
    x, out = whole(0, 4), whole(4, 4)
    assert np.isnan(apply(executor, ir.Softcap(out, x, 2.0), {x: values}, no_step(1))[0, 0])
    np.testing.assert_allclose(
        apply(executor, ir.Softcap(out, x, 2.0), {x: values}, no_step(1))[0, 1:], [2 * math.tanh(0.5), 2, -2], rtol=1e-6
    )
    assert np.isnan(apply(executor, ir.GeluTanh(out, x), {x: values}, no_step(1))[0, 0])
    assert np.isnan(apply(executor, ir.RmsNorm(out, x, np.ones(4, np.float32), 1e-5), {x: values}, no_step(1))).all()
