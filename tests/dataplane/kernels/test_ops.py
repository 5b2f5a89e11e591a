"""Each operation of the seam against its formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dataplane.kernels import ops


def values(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_norms_follow_their_formulas() -> None:
    x, weight, bias = values(5, 24), values(24, seed=1), values(24, seed=2)
    wide = x.double()
    root = (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(ops.rms_norm(x, weight, 1e-5), wide / root * weight)
    spread = ((wide - wide.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), (wide - wide.mean(-1, keepdim=True)) / spread * weight + bias)


def test_a_norm_as_wide_as_a_head_takes_each_head_by_itself() -> None:
    x, weight = values(5, 24), values(8, seed=1)
    heads = [ops.rms_norm(part, weight, 1e-6) for part in ops.split(x, (8, 8, 8))]
    assert_close(ops.rms_norm(x, weight, 1e-6), torch.cat(heads, -1).double())
    whole, _ = ops.split(values(5, 40, seed=3), (24, 16))
    assert_close(ops.rms_norm(whole, weight, 1e-6), ops.rms_norm(whole.contiguous(), weight, 1e-6).double())


@pytest.mark.parametrize("turned", [8, 4])
def test_rotation_turns_pairs_and_leaves_the_rest(turned: int) -> None:
    """(a, b) → (a·cos − b·sin, b·cos + a·sin) for columns i and i + r/2 of each head; other columns stay."""
    heads, dim, half = 3, 8, turned // 2
    angles = torch.rand(10, half, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    x, positions = values(4, heads * dim), torch.tensor([7, 0, 3, 9])
    expected = x.double().view(4, heads, dim).clone()
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            turn = torch.polar(torch.ones(heads, dtype=torch.float64), angles[position, pair].double().expand(heads))
            both = torch.complex(expected[token, :, pair], expected[token, :, pair + half]) * turn
            expected[token, :, pair], expected[token, :, pair + half] = both.real, both.imag
    assert_close(ops.rotate(x, ops.turn(positions, cos, sin), dim), expected.flatten(1))


def test_gates_activations_and_caps_follow_their_formulas() -> None:
    x, wide = values(4, 12), values(4, 12).double()
    gate, up = wide.chunk(2, -1)
    gelu = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert_close(ops.silu_mul(x), gate / (1 + torch.exp(-gate)) * up)
    assert_close(ops.gelu_tanh_mul(x), gelu.chunk(2, -1)[0] * up)
    assert_close(ops.gelu_tanh(x), gelu)
    assert_close(ops.softcap(x * 40, 5.0), 5 * torch.tanh(wide * 8))
    assert_close(ops.scale(x, 1.5), wide * 1.5)
    assert_close(ops.add(x, x), wide * 2)


def test_products_and_rows() -> None:
    x, weight, bias = values(3, 6), values(5, 6, seed=1), values(5, seed=2)
    assert_close(ops.linear(x, weight), x.double() @ weight.double().T)
    assert_close(ops.linear(x, weight, bias), x.double() @ weight.double().T + bias)
    assert torch.equal(ops.embed(torch.tensor([4, 0, 4]), weight), weight[[4, 0, 4]])
    left, right = ops.split(x, (2, 4))
    assert torch.equal(torch.cat((left, right), -1), x)
