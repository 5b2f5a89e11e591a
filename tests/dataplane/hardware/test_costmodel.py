"""The cost of an operator: exact counts of products that really ran, and the published reference values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataplane.hardware.costmodel import (
    BF16,
    FP32,
    Bound,
    Ceilings,
    Format,
    Op,
    Precision,
    attention,
    causal_pairs,
    critical_batch,
    experts,
    grouped,
    latent_attention,
    least_touched,
    linear,
    touched_experts,
)
from dataplane.hardware.figure import FigureKind
from tests.dataplane.hardware.counting import ProductCounter

DEVICE = Ceilings({Precision.BF16: 1e12}, 1e10, FigureKind.CONFIGURED, "a round device")


@pytest.mark.parametrize(
    ("new", "cached", "window"), [(7, 0, 0), (5, 11, 0), (9, 0, 4), (6, 3, 5), (4, 20, 5), (3, 0, 99)]
)
def test_pairs_are_those_of_the_mask(new: int, cached: int, window: int) -> None:
    query, key = np.arange(cached, cached + new)[:, None], np.arange(cached + new)
    mask = (key <= query) & ((query - key < window) if window else True)
    assert causal_pairs(new, cached, window) == mask.sum()


def test_a_product_costs_what_it_multiplies_and_moves() -> None:
    with ProductCounter() as counted:
        torch.randn(5, 24) @ torch.randn(24, 40)
    op = linear(5, 24, 40, FP32, activations=FP32)
    assert op.flops == counted.flops
    assert op.bytes == 4 * (24 * 40 + 5 * 24 + 5 * 40)
    assert linear(5, 24, 40, FP32, activations=None).bytes == 4 * 24 * 40


@pytest.mark.parametrize(
    ("bits", "group", "effective"), [(4, 128, 4 + 20 / 128), (8, 128, 8 + 24 / 128), (4, 32, 4.625)]
)
def test_effective_bits_of_a_group_are_its_own_and_its_share_of_scale_and_zero(
    bits: int, group: int, effective: float
) -> None:
    assert grouped(bits, group).bytes_each * 8 == pytest.approx(effective)
    assert linear(1, 128, 128, grouped(bits, group), activations=None).bytes == pytest.approx(128 * 128 * effective / 8)


def test_a_symmetric_group_has_no_zero() -> None:
    assert grouped(4, 128, zero=False).bytes_each * 8 == pytest.approx(4 + 16 / 128)


def test_mqa_and_mha_are_the_ends_of_gqa() -> None:
    def bytes_of(kv_heads: int) -> float:
        return attention(
            queries=1, pairs=100, context=100, heads=8, kv_heads=kv_heads, head_dim=64, activations=None
        ).bytes

    assert bytes_of(8) == 8 * bytes_of(1) == 2 * 100 * 8 * 64 * 2


def test_decode_attention_intensity_is_that_of_the_group() -> None:
    op = attention(queries=1, pairs=4096, context=4096, heads=32, kv_heads=8, head_dim=128, activations=None)
    assert op.intensity == 2 * (32 / 8) / 2


def test_absorbed_mla_is_counted_as_it_runs_and_equals_the_decompressed_path() -> None:
    heads, nope, rope, value, rank, context = 4, 8, 4, 6, 16, 10
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    latents, rope_keys = draw(context, rank), draw(context, rope)
    up_keys, up_values = draw(heads, rank, nope), draw(heads, rank, value)
    query, rope_query = draw(heads, 1, nope), draw(heads, 1, rope)
    absorbed_query = torch.bmm(query, up_keys.transpose(1, 2))
    spread = latents.expand(heads, context, rank)
    with ProductCounter() as counted:
        scores = torch.bmm(absorbed_query, spread.transpose(1, 2))
        scores = scores + torch.bmm(rope_query, rope_keys.T.expand(heads, rope, context))
        mixed = torch.bmm(scores.softmax(-1), spread)
    op = latent_attention(
        queries=1, pairs=context, context=context, heads=heads, rank=rank, rope_dim=rope, activations=None
    )
    assert op.flops == counted.flops
    assert op.bytes == context * (rank + rope) * 2

    keys, values = torch.bmm(spread, up_keys), torch.bmm(spread, up_values)
    plain = torch.bmm(query, keys.transpose(1, 2)) + torch.bmm(rope_query, rope_keys.T.expand(heads, rope, context))
    naive = torch.bmm(plain.softmax(-1), values)
    assert (torch.bmm(mixed, up_values) - naive).abs().max() < 1e-5


def test_mla_intensity_is_near_twice_its_heads() -> None:
    op = latent_attention(queries=1, pairs=1000, context=1000, heads=128, rank=512, rope_dim=64, activations=None)
    assert op.intensity == pytest.approx(2 * 128 * (2 * 512 + 64) / ((512 + 64) * 2))


def test_experts_touched_match_uniform_routing_and_a_skewed_router_touches_fewer() -> None:
    experts_, top_k, tokens, trials = 32, 4, 12, 400
    rng = np.random.default_rng(0)
    skew = 1.0 / np.arange(1, experts_ + 1)

    def touched(weights: np.ndarray) -> list[int]:
        chosen = [
            {e for _ in range(tokens) for e in rng.choice(experts_, top_k, replace=False, p=weights)}
            for _ in range(trials)
        ]
        return [len(found) for found in chosen]

    uniform, skewed = touched(np.full(experts_, 1 / experts_)), touched(skew / skew.sum())
    expected = touched_experts(experts_, top_k, tokens)
    assert np.mean(uniform) == pytest.approx(expected, abs=4 * np.std(uniform) / trials**0.5)
    assert np.mean(skewed) < expected - 4 * np.std(skewed) / trials**0.5
    assert min(skewed) >= least_touched(experts_, top_k, tokens) == top_k


def test_one_token_touches_its_own_experts_and_many_touch_all() -> None:
    assert touched_experts(64, 6, 1) == pytest.approx(6)
    assert touched_experts(64, 6, 10_000) == pytest.approx(64)
    assert touched_experts(8, 8, 1) == 8
    assert least_touched(64, 6, 0) == 0


def test_routed_experts_cost_what_a_loop_over_them_multiplies() -> None:
    hidden, inner, top_k, tokens = 16, 24, 2, 7
    generator = torch.Generator().manual_seed(1)
    weights = [
        [torch.randn(hidden, inner, generator=generator), torch.randn(hidden, inner, generator=generator),
         torch.randn(inner, hidden, generator=generator)] for _ in range(5)
    ]  # fmt: skip
    choice = torch.stack([torch.randperm(5, generator=generator)[:top_k] for _ in range(tokens)])
    x = torch.randn(tokens, hidden, generator=generator)
    with ProductCounter(matrix for expert in weights for matrix in expert) as counted:
        for index, (gate, up, down) in enumerate(weights):
            rows = x[(choice == index).any(1)]
            if len(rows):
                (torch.nn.functional.silu(rows @ gate) * (rows @ up)) @ down
    op = experts(
        tokens=tokens, hidden=hidden, inner=inner, top_k=top_k, touched=len(choice.unique()), weights=FP32,
        activations=None,
    )  # fmt: skip
    assert (op.flops, op.bytes) == (counted.flops, counted.bytes)


def test_the_roofline_takes_the_longer_side_and_the_sum_over_operators() -> None:
    heavy, wide = Op("heavy", 1e12, 1e9), Op("wide", 1e9, 1e10)
    assert DEVICE.seconds(heavy) == pytest.approx(1.0)
    assert DEVICE.bound(heavy) is Bound.COMPUTE
    assert DEVICE.seconds(wide) == pytest.approx(1.0)
    assert DEVICE.bound(wide) is Bound.MEMORY
    assert DEVICE.seconds([heavy, wide]) == pytest.approx(2.0)


def test_what_is_reached_stretches_its_own_side() -> None:
    half = DEVICE.derated(
        flops_share=0.5, bandwidth_share=0.25, launch_s=0.5, kind=FigureKind.CALIBRATED, source="a fit"
    )
    assert half.seconds(Op("heavy", 1e12, 1e9)) == pytest.approx(2.0 + 0.5)
    assert half.seconds(Op("wide", 1e9, 1e10)) == pytest.approx(4.0 + 0.5)
    assert half.kind is FigureKind.CALIBRATED


def test_a_precision_the_device_lacks_is_named() -> None:
    with pytest.raises(LookupError, match="a round device gives no ceiling for fp8"):
        DEVICE.seconds(Op("x", 1, 1, Precision.FP8))


def test_work_is_never_negative() -> None:
    with pytest.raises(ValueError, match="cannot take -1 FLOPs"):
        Op("x", -1, 0)


def test_the_critical_batch_is_where_a_layer_turns_to_compute() -> None:
    batch = critical_batch(DEVICE, Precision.BF16, BF16)
    assert batch == 100
    for tokens, bound in ((int(batch) - 1, Bound.MEMORY), (int(batch) + 1, Bound.COMPUTE)):
        assert DEVICE.bound(linear(tokens, 4096, 4096, activations=None)) is bound
    assert critical_batch(DEVICE, Precision.BF16, Format("int4", 4)) == batch / 4
