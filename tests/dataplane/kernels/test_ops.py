"""Each operation of the seam against its formula in float64, and models that are written with nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dataplane.kernels import ops
from dataplane.models.registry import build
from dataplane.models.shape import ModelShape
from tests.factories.families import config_of

VARIANTS = ("llama-biased", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3")


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


@dataclass
class Symbol:
    """A value that knows its width and nothing to do with it."""

    width: int


class Recorded:
    """Stands in for the operations: notes each call, checks the widths, gives symbols."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.windows: list[int | None] = []

    def note(self, name: str, width: int) -> Symbol:
        self.names.append(name)
        return Symbol(width)

    def linear(self, x: Symbol, weight: Tensor, bias: Tensor | None = None) -> Symbol:
        assert x.width == weight.shape[1] and (bias is None or len(bias) == len(weight))
        return self.note("linear", len(weight))

    def split(self, x: Symbol, sizes: Sequence[int]) -> list[Symbol]:
        assert sum(sizes) == x.width
        return [self.note("split", size) for size in sizes]

    def add(self, x: Symbol, y: Symbol) -> Symbol:
        assert x.width == y.width
        return self.note("add", x.width)

    def rms_norm(self, x: Symbol, weight: Tensor, eps: float) -> Symbol:
        assert x.width % len(weight) == 0 and eps > 0
        return self.note("rms_norm", x.width)

    def rotate(self, x: Symbol, by: Symbol, head_dim: int) -> Symbol:
        assert x.width % head_dim == 0 and by.width <= head_dim
        return self.note("rotate", x.width)

    def run(
        self,
        layer: int,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Symbol:
        assert k.width == v.width and q.width % k.width == 0 and scale > 0
        self.windows.append(window)
        return self.note("attention", q.width)

    def same(self, name: str) -> Callable[..., Symbol]:
        return lambda x, *parameters: self.note(name, x.width)

    def half(self, name: str) -> Callable[[Symbol], Symbol]:
        return lambda x: self.note(name, x.width // 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_is_written_with_these_operations_alone(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward runs on symbols, which anything else would trip over: so a step can be recorded as it is."""
    config_of(variant).save_pretrained(tmp_path)
    shape = ModelShape.read(tmp_path)
    with torch.device("meta"):
        model = build(shape, 16)
    seen = Recorded()
    for name in ("linear", "split", "add", "rms_norm", "rotate"):
        monkeypatch.setattr(ops, name, getattr(seen, name))
    for name in ("scale", "softcap", "layer_norm", "gelu_tanh"):
        monkeypatch.setattr(ops, name, seen.same(name))
    for name in ("silu_mul", "gelu_tanh_mul"):
        monkeypatch.setattr(ops, name, seen.half(name))
    monkeypatch.setattr(ops, "embed", lambda ids, table: seen.note("embed", table.shape[1]))
    monkeypatch.setattr(ops, "turn", lambda positions, cos, sin: seen.note("turn", cos.shape[1]))
    hidden = model(Symbol(1), Symbol(1), seen)  # type: ignore[arg-type]  # symbols on purpose
    assert isinstance(hidden, Symbol) and hidden.width == shape.hidden
    logits = model.logits(hidden)  # type: ignore[arg-type]
    assert isinstance(logits, Symbol) and logits.width == shape.vocab
    assert seen.names.count("attention") == shape.layers
    assert seen.windows == [shape.window(layer) for layer in range(shape.layers)]
    assert seen.names.count("linear") == 4 * shape.layers + 1
