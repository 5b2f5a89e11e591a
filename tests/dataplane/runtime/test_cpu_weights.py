"""Weights packed for the CPU kernels: the numbers that the eager loader reads, in every format, or a named refusal."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from dataplane.errors import CheckpointError
from dataplane.execution import Execution, ForwardKind, weight_bytes
from dataplane.kernels.cpu.packing import unpack
from dataplane.kernels.packed import Format
from dataplane.models.gguf_file import GGUFFile
from dataplane.models.loader import load_model, outline
from dataplane.models.registry import Model
from dataplane.models.shape import ModelShape
from dataplane.models.sources import open_source
from dataplane.models.weight_format import WeightFormat
from dataplane.runtime.cpu_weights import CpuWeights
from tests.factories.families import config_of, random_model, saved
from tests.factories.gguf_families import converted
from tests.factories.models import tiny_config, tiny_weights, write_gguf, write_safetensors

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
"""Sizes that every block type divides."""
KINDS = {
    "Q4_0": Format.UINT4,
    "Q4_1": Format.UINT4,
    "Q5_0": Format.INT8,
    "Q5_1": Format.INT8,
    "Q8_0": Format.INT8,
    "F16": Format.FLOAT32,
    "F32": Format.FLOAT32,
}


def opened(path: Path, weights: WeightFormat, stack: ExitStack) -> tuple[Model, CpuWeights]:
    shape = ModelShape.read(path)
    source = open_source(path, shape, stack)
    model = outline(source, shape, 64, path.name)
    return model, CpuWeights(model, source, shape, 64, weights)


def parameters(model: Model) -> dict[str, Tensor]:
    assert isinstance(model, torch.nn.Module)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def eager(path: Path) -> dict[str, Tensor]:
    shape = ModelShape.read(path)
    return parameters(load_model(path, shape, positions=64, dtype=torch.float32, device=torch.device("cpu")))


def assert_packed(path: Path, weights: WeightFormat, *, step: float, formats: set[Format]) -> CpuWeights:
    """Every matrix as the eager loader has it, up to `step` of the largest weight of its row and block."""
    expected, seen = eager(path), set()
    with ExitStack() as stack:
        model, packed = opened(path, weights, stack)
        for name, parameter in parameters(model).items():
            theirs = expected[name].numpy()
            if parameter.dim() == 1 or name.endswith(("cos", "sin")):
                np.testing.assert_array_equal(packed.floats(parameter), theirs)
                continue
            ours = packed.matrix(parameter)
            seen.add(ours.format)
            assert (ours.rows, ours.columns) == theirs.shape
            largest = np.abs(theirs.reshape(len(theirs), -1, 32)).max(-1).repeat(32, -1)
            assert (np.abs(unpack(ours) - theirs) <= step * largest + 1e-7).all(), name
    assert seen == formats
    return packed


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_file_are_kept_as_they_are(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_config(**WIDE), kind=GGMLQuantizationType[kind])
    assert_packed(path, WeightFormat.BLOCKS, step=2e-3, formats={KINDS[kind]})


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "phi", "phi3", "llama-biased"])
@pytest.mark.parametrize("weights", [WeightFormat.FLOAT32, WeightFormat.INT8])
def test_every_family_is_packed_from_safetensors_and_from_gguf(
    tmp_path: Path, variant: str, weights: WeightFormat
) -> None:
    options = {"mlp_bias": False} if variant == "llama-biased" else {}
    folder, theirs = saved(tmp_path / "folder", variant, **options)
    step, formats = {WeightFormat.FLOAT32: (0.0, {Format.FLOAT32}), WeightFormat.INT8: (0.005, {Format.INT8})}[weights]
    assert_packed(folder, weights, step=step, formats=formats)
    assert_packed(converted(tmp_path / "m.gguf", theirs), weights, step=step, formats=formats)


def test_a_fused_matrix_of_blocks_is_taken_apart(tmp_path: Path) -> None:
    path = converted(tmp_path / "m.gguf", random_model(config_of("phi")), fused=True)
    assert_packed(path, WeightFormat.BLOCKS, step=0.0, formats={Format.FLOAT32})


def test_a_tied_head_is_packed_once_and_every_byte_is_counted(tmp_path: Path) -> None:
    for tied in (True, False):
        path = write_safetensors(tmp_path / str(tied), tiny_config(tie_word_embeddings=tied))
        for weights in (WeightFormat.FLOAT32, WeightFormat.INT8, WeightFormat.INT4):
            with ExitStack() as stack:
                model, packed = opened(path, weights, stack)
                found = {
                    id(one): one
                    for name, p in parameters(model).items()
                    if p.dim() == 2 and "rotary" not in name
                    for one in [packed.matrix(p)]
                }
                table, head = packed.matrix(model.embedding), packed.matrix(model.head)  # type: ignore[attr-defined]
                assert (table is head) is tied
                assert packed.nbytes == sum(one.nbytes for one in found.values())
                assert packed.nbytes == weight_bytes(
                    path, ModelShape.read(path), Execution(ForwardKind.CAPTURED, weights)
                )


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_the_bytes_of_a_file_of_blocks_are_known_before_it_is_loaded(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_config(**WIDE), kind=GGMLQuantizationType[kind])
    packed = assert_packed(path, WeightFormat.BLOCKS, step=2e-3, formats={KINDS[kind]})
    vectors = sum(tensor.nbytes for name, tensor in eager(path).items() if tensor.dim() == 1)
    known = weight_bytes(path, ModelShape.read(path), Execution(ForwardKind.CAPTURED, WeightFormat.BLOCKS))
    assert packed.nbytes == known + vectors


def refused(path: Path, weights: WeightFormat) -> str:
    with ExitStack() as stack, pytest.raises(CheckpointError) as refusal:
        model, packed = opened(path, weights, stack)
        for name, parameter in parameters(model).items():
            if parameter.dim() == 2 and "rotary" not in name:
                packed.matrix(parameter)
            else:
                packed.floats(parameter)
    return str(refusal.value)


@pytest.mark.parametrize("weights", [WeightFormat.FLOAT32, WeightFormat.INT8, WeightFormat.INT4])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(
    tmp_path: Path, weights: WeightFormat, name: str, value: float
) -> None:
    values = tiny_weights(tiny_config())
    values[name].view(-1)[3] = value
    folder = write_safetensors(tmp_path, tiny_config(), values)
    assert refused(folder, weights) == f"{name} holds a number that is not finite"
    with pytest.raises(CheckpointError, match="holds a number that is not finite"):
        eager(folder)


def test_a_block_whose_scale_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_config(), kind=GGMLQuantizationType.Q4_0)
    data = bytearray(path.read_bytes())
    at = GGUFFile.open(path).tensors["blk.1.ffn_up.weight"].offset
    data[at : at + 2] = np.float16("nan").tobytes()
    path.write_bytes(data)
    assert "mlp.up_proj" in refused(path, WeightFormat.BLOCKS)


def test_what_does_not_fit_is_refused_as_the_eager_loader_does(tmp_path: Path) -> None:
    config = tiny_config()
    whole = tiny_weights(config)
    lacking = {name: values for name, values in whole.items() if "up_proj" not in name}
    other = whole | {"model.layers.0.mlp.up_proj.weight": torch.zeros(95, 64)}
    extra = whole | {"model.layers.0.mlp.side_proj.weight": torch.zeros(4, 4)}
    for index, weights in enumerate((lacking, other, extra)):
        folder = write_safetensors(tmp_path / str(index), config, weights)
        with pytest.raises(CheckpointError) as theirs:
            eager(folder)
        assert refused(folder, WeightFormat.INT8) == str(theirs.value)
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "0" / "model.safetensors")
    assert "layers and holds 1 tensors" in refused(tmp_path / "0", WeightFormat.FLOAT32)
