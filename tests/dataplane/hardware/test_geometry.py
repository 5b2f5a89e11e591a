"""A whole model: the published examples, and exact equality with what a real forward pass multiplies and reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dataplane.hardware.costmodel import FP8, FP32, grouped, touched_experts
from dataplane.hardware.geometry import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KNOWN,
    LLAMA_3_1_8B,
    OPT_13B,
    Geometry,
    StepSize,
    totals,
)
from dataplane.models.loader import load_model
from dataplane.models.shape import ModelShape
from tests.dataplane.hardware.counting import CausalAttention, ProductCounter
from tests.factories.models import tiny_config, write_safetensors


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [(LLAMA_3_1_8B, 131_072), (OPT_13B, 819_200), (DEEPSEEK_V3, 70_272), (DEEPSEEK_V2, 69_120)],
    ids=lambda value: getattr(value, "name", None),
)
def test_kv_bytes_per_token_of_the_published_examples(geometry: Geometry, expected: int) -> None:
    assert geometry.kv_bytes_per_token() == expected


def test_tensor_parallelism_divides_key_heads_rounded_up_and_never_a_latent() -> None:
    assert LLAMA_3_1_8B.kv_bytes_per_token(8) == 131_072 / 8
    assert LLAMA_3_1_8B.kv_bytes_per_token(16) == 131_072 / 8
    assert replace(LLAMA_3_1_8B, kv_heads=6).kv_bytes_per_token(4) == 2 * 32 * 2 * 128 * 2
    assert DEEPSEEK_V3.kv_bytes_per_token(8) == 70_272


def test_a_quantised_cache_takes_its_effective_bits() -> None:
    assert replace(LLAMA_3_1_8B, kv=FP8).kv_bytes_per_token() == 131_072 / 2
    assert replace(LLAMA_3_1_8B, kv=grouped(4, 128)).kv_bytes_per_token() == pytest.approx(
        131_072 / 16 * (4 + 20 / 128)
    )


@pytest.mark.parametrize(
    ("geometry", "billions"), [(LLAMA_3_1_8B, 8.03), (OPT_13B, 12.85), (DEEPSEEK_V2, 235.7), (DEEPSEEK_V3, 671.0)],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_parameters_add_up_to_the_published_size(geometry: Geometry, billions: float) -> None:
    assert geometry.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_deepseek_v3_activates_37_billion() -> None:
    assert (DEEPSEEK_V3.active_parameters + DEEPSEEK_V3.hidden * DEEPSEEK_V3.vocab) / 1e9 == pytest.approx(37, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cached", [0, 5])
def test_the_formulas_equal_what_a_real_forward_pass_multiplies_and_reads(
    tmp_path: Path, cached: int, tied: bool
) -> None:
    shape = ModelShape.read(write_safetensors(tmp_path / "m", tiny_config(tie_word_embeddings=tied)))
    model = load_model(tmp_path / "m", shape, positions=64, dtype=torch.float32, device=torch.device("cpu"))
    attend = CausalAttention(shape.layers, 64, shape.kv_heads, shape.head_dim)
    ids = torch.arange(3, 3 + cached + 7)

    def forward(tokens: torch.Tensor, start: int) -> torch.Tensor:
        hidden = model(tokens, torch.arange(start, start + len(tokens)), attend)
        attend.computed += len(tokens)
        return model.logits(hidden[-1:])

    with torch.inference_mode():
        if cached:
            forward(ids[:cached], 0)
        layers = [tensor for name, tensor in model.weights().items() if ".layers." in name and "norm" not in name]
        watched = [*layers, model.head, *attend.keys, *attend.values]
        with ProductCounter(watched) as counted:
            forward(ids[cached:], cached)
    size = StepSize.prefill(len(ids) - cached, cached)
    geometry = Geometry.of(shape, "tiny")
    assert totals(geometry.step(size)) == (counted.flops, counted.bytes)
    assert shape.step_flops(size.tokens, size.pairs, size.rows) == counted.flops
    moved = 4 * (shape.layer_parameters + shape.head_parameters) + shape.kv_bytes_per_token * size.context
    assert moved == counted.bytes


def test_a_decode_step_reads_every_context_once_and_the_weights_once() -> None:
    contexts = [100, 7, 2000]
    flops, moved = totals(LLAMA_3_1_8B.step(StepSize.decode(contexts)))
    parameters, head = LLAMA_3_1_8B.active_parameters, LLAMA_3_1_8B.hidden * LLAMA_3_1_8B.vocab
    assert flops == 2 * (parameters + head) * 3 + 4 * 32 * 32 * 128 * sum(contexts)
    assert moved == 2 * (parameters + head) + 131_072 * sum(contexts)


def test_chunks_of_a_prompt_pair_as_often_as_the_whole() -> None:
    whole = StepSize.prefill(1000)
    chunks = StepSize.prefill(400, 0, 0) + StepSize.prefill(350, 400, 0) + StepSize.prefill(250, 750)
    assert (chunks.tokens, chunks.pairs, chunks.rows) == (whole.tokens, whole.pairs, whole.rows)
    assert chunks.context > whole.context, "every chunk reads its past again"


def test_a_mixture_reads_the_experts_a_batch_touches_and_multiplies_with_its_own() -> None:
    mixture = DEEPSEEK_V3.mixture
    assert mixture is not None
    expert, layers = 3 * 7168 * 2048, 58

    def weights(batch: int) -> tuple[float, float]:
        return totals([op for op in DEEPSEEK_V3.step(StepSize(batch, 0, 0)) if op.name == "experts"])

    for batch in (1, 16, 512):
        flops, moved = weights(batch)
        assert flops == 2.0 * batch * 8 * expert * layers
        assert moved == pytest.approx(2 * touched_experts(256, 8, batch) * expert * layers)
    assert weights(16)[1] > 10 * weights(1)[1], "a small batch of a mixture still reads most of its experts"


def test_every_known_geometry_makes_a_step_with_work_of_every_kind() -> None:
    for geometry in KNOWN:
        ops = geometry.step(StepSize.prefill(16, 16))
        assert {"linear", "head"} < {op.name for op in ops}
        assert all(op.flops > 0 and op.bytes > 0 for op in ops), geometry.name


def test_half_the_bytes_halve_the_weights_and_leave_the_flops() -> None:
    full, half = replace(LLAMA_3_1_8B, weights=FP32), replace(LLAMA_3_1_8B, weights=FP8)
    size = StepSize(1, 0, 0)
    assert totals(full.step(size))[0] == totals(half.step(size))[0]
    assert totals(full.step(size))[1] == 4 * totals(half.step(size))[1]
