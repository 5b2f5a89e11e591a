"""Every family from a GGUF file: the same logits as transformers has from the weights the file was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from transformers import PreTrainedModel
from transformers.integrations.gguf.dequant import dequantize

from dataplane.config import EngineConfig
from dataplane.models.gguf_file import SUPPORTED, GGUFFile
from dataplane.models.loader import load_model
from dataplane.models.shape import ModelShape
from dataplane.runtime.model_runner import ModelRunner
from tests.dataplane.parity.helpers import logits, prompts
from tests.factories.families import config_of, random_model, reference_logits, saved
from tests.factories.gguf_families import converted

FAMILIES = {
    "llama-biased": {"mlp_bias": False},
    "llama-yarn": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    },
    "phi": {},
    "phi3": {},
    "phi3-long": {},
}
"""Variants as llama.cpp can say them: scores scaled by the head size, Gemma 3's windows in its own order."""


def assert_logits(path: Path, theirs: PreTrainedModel, tokens: list[int]) -> None:
    expected = reference_logits(theirs, tokens)
    for forward in ("eager", "captured"):
        config = EngineConfig.resolve(
            path, num_blocks=33, threads=1, max_model_len=96, forward=forward, weights="float32"
        )
        runner = ModelRunner(config, lambda: 0.0)
        torch.testing.assert_close(logits(runner, tokens, 37), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_from_gguf_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    theirs = random_model(config_of(variant, **FAMILIES[variant]))
    assert_logits(converted(tmp_path / "tiny.gguf", theirs), theirs, prompts()[-1])


def test_fused_queries_keys_and_values_of_old_phi_files_are_taken_apart(tmp_path: Path) -> None:
    theirs = random_model(config_of("phi"))
    assert_logits(converted(tmp_path / "tiny.gguf", theirs, fused=True), theirs, prompts()[3])


@pytest.mark.parametrize("variant", ["qwen2", "gemma", "gemma2", "phi3", "llama-yarn"])
def test_both_formats_tell_the_same_geometry(tmp_path: Path, variant: str) -> None:
    folder, theirs = saved(tmp_path / "folder", variant, **FAMILIES[variant])
    one, two = ModelShape.read(converted(tmp_path / "tiny.gguf", theirs)), ModelShape.read(folder)
    assert one.rms_eps == pytest.approx(two.rms_eps)
    assert one.scale == pytest.approx(two.scale)
    one = replace(one, rms_eps=two.rms_eps, attention_scale=two.attention_scale)
    if two.rope_scaling is not None and one.rope_scaling is not None:
        assert one.rope_scaling.attention_factor == pytest.approx(two.rope_scaling.attention_factor)
        one = replace(one, rope_scaling=two.rope_scaling)
    assert one == two


def random_blocks(rows: int, columns: int, kind: GGMLQuantizationType) -> np.ndarray:
    """Raw rows of `kind`: random bytes with sane scales."""
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    if block == 1:
        values = torch.from_numpy(generator.normal(0, 0.1, (rows, columns)).astype(np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
        return values.to(dtype).view(torch.uint8).numpy()
    raw = generator.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    start, halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1)}.get(
        kind.name, (0, 1)
    )
    scales = generator.uniform(0.0005, 0.005, (len(raw), halves)).astype(np.float16)
    raw[:, start : start + 2 * halves] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def dequantised(raw: np.ndarray, kind: GGMLQuantizationType, columns: int) -> torch.Tensor:
    """By transformers' own reading of a block."""
    if kind.name in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
        return torch.from_numpy(raw.copy()).view(dtype).float()
    if kind.name in ("Q5_0", "Q5_1"):
        return torch.from_numpy(five_bits(raw, biased=kind.name == "Q5_1").reshape(-1, columns))
    return dequantize(torch.from_numpy(raw.copy()), int(kind)).reshape(-1, columns).float()


def five_bits(raw: np.ndarray, *, biased: bool) -> np.ndarray:
    """ggml's `block_q5_0` (scale · (q − 16)) and `block_q5_1` (scale · q + least): 32 values of 5 bits."""
    head = 4 if biased else 2
    out = []
    for block in raw.reshape(-1, head + 20):
        scale, *least = block[:head].view(np.float16).astype(np.float32)
        high = int.from_bytes(block[head : head + 4].tobytes(), "little")
        for index in range(32):
            nibble = block[head + 4 + index % 16] >> (4 * (index // 16)) & 15
            value = int(nibble) | (high >> index & 1) << 4
            out.append(scale * value + least[0] if biased else scale * (value - 16))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("kind", sorted(SUPPORTED, key=int), ids=lambda kind: kind.name)
def test_every_block_type_gives_the_weights_it_stands_for(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """A whole model whose matrices are raw blocks; the reference reads the same bytes."""
    config = config_of("qwen3", hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64)
    theirs = random_model(config)
    plain = GGUFReader(converted(tmp_path / "plain.gguf", theirs))
    writer = GGUFWriter(tmp_path / "blocks.gguf", "qwen3")
    for field in list(plain.fields.values()):
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    expected: dict[str, torch.Tensor] = {}
    for tensor in plain.tensors:
        columns, *rows = tensor.shape.tolist()
        if not rows:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        raw = random_blocks(rows[0], columns, kind)
        writer.add_tensor(tensor.name, raw, raw_dtype=kind)
        expected[tensor.name] = dequantised(raw, kind, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = tmp_path / "blocks.gguf"
    file = GGUFFile.open(path)
    assert {info.kind for info in file.tensors.values() if len(info.shape) == 2} == {kind}
    shape = ModelShape.read(path)
    ours = load_model(path, shape, positions=8, dtype=torch.float32, device=torch.device("cpu")).weights()
    found = {
        "token_embd.weight": ours["model.embed_tokens.weight"],
        "blk.1.attn_q.weight": ours["model.layers.1.self_attn.q_proj.weight"],
        "blk.0.attn_output.weight": ours["model.layers.0.self_attn.o_proj.weight"],
        "blk.1.ffn_down.weight": ours["model.layers.1.mlp.down_proj.weight"],
        "blk.0.ffn_up.weight": ours["model.layers.0.mlp.up_proj.weight"],
    }
    for name, weights in found.items():
        assert expected[name].std() > 1e-3
        torch.testing.assert_close(weights, expected[name], rtol=1e-5, atol=1e-6)


def test_the_largest_gemmas_scale_scores_by_the_width(tmp_path: Path) -> None:
    """llama.cpp knows them by their layers; no key says it."""
    theirs = random_model(config_of("gemma2", num_hidden_layers=46, layer_types=None))
    shape = ModelShape.read(converted(tmp_path / "tiny.gguf", theirs))
    assert shape.scale == pytest.approx((64 / 4) ** -0.5)
    assert shape.windows == (16, None) * 23
