"""How a model is run: what `auto` becomes, what is refused with which reason, and that memory is reckoned with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from dataplane import config, execution
from dataplane.config import ConfigError, EngineConfig, ForwardKind, WeightFormat
from dataplane.execution import Execution, choose, weight_bytes
from dataplane.models.shape import ModelShape
from tests.factories.models import tiny_config, write_gguf, write_safetensors

EAGER, CAPTURED = ForwardKind.EAGER, ForwardKind.CAPTURED
NO_COMPILER = "no C++ compiler was found"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("floats"), tiny_config())


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("blocks") / "m.gguf", tiny_config(), kind=GGMLQuantizationType.Q4_1)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("half") / "m.gguf", tiny_config(), kind=GGMLQuantizationType.F16)


def chosen(path: Path, **options: str) -> Execution:
    return choose(path, ModelShape.read(path), **options)


def test_auto_is_captured_and_keeps_a_files_own_blocks(floats: Path, quantised: Path, half: Path) -> None:
    for path in (floats, quantised, half):
        assert chosen(path, weights="float32") == (CAPTURED, WeightFormat.FLOAT32)
        assert chosen(path, forward="eager") == (EAGER, WeightFormat.FLOAT32)
    for forward in ("auto", "captured"):
        assert chosen(floats, forward=forward) == (CAPTURED, WeightFormat.FLOAT32)
        assert chosen(half, forward=forward) == (CAPTURED, WeightFormat.FLOAT32)
        assert chosen(quantised, forward=forward) == (CAPTURED, WeightFormat.BLOCKS)
    assert chosen(quantised, forward="captured", weights="float32") == (CAPTURED, WeightFormat.FLOAT32)
    assert chosen(quantised, weights="blocks") == (CAPTURED, WeightFormat.BLOCKS)
    assert chosen(floats, weights="int8") == (CAPTURED, WeightFormat.INT8)


def test_where_there_are_no_kernels_auto_is_eager_and_all_else_is_refused(
    floats: Path, quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution.build, "offer", lambda: NO_COMPILER)
    for path in (floats, quantised):
        for weights in ("auto", "float32"):
            assert chosen(path, weights=weights) == (EAGER, WeightFormat.FLOAT32)
    for options, asked in (
        ({"forward": "captured"}, "forward=captured"),
        ({"weights": "int8"}, "weights=int8"),
        ({"weights": "blocks"}, "weights=blocks"),
    ):
        with pytest.raises(ConfigError, match=f"^{asked} cannot work here: {NO_COMPILER.replace('+', '.')}$"):
            chosen(quantised, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weights": "blocks"}, "weights=blocks keeps the blocks of a quantised GGUF file, and .* holds none"),
        ({"weights": "int3"}, "weights must be one of auto, float32, blocks, int8, int4, got 'int3'"),
        ({"forward": "fast"}, "forward must be one of auto, eager, captured, got 'fast'"),
        ({"forward": "eager", "weights": "int8"}, "forward=eager multiplies in float32 only"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    floats: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig.resolve(floats, num_blocks=33, **options)


def test_sizes_that_blocks_do_not_divide_are_refused_for_made_formats_alone(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, tiny_config(intermediate_size=80))
    for weights in ("int8", "int4"):
        with pytest.raises(ConfigError, match=f"weights={weights} needs sizes that 32 divides; .* intermediate is 80"):
            EngineConfig.resolve(folder, num_blocks=33, weights=weights)
    assert EngineConfig.resolve(folder, num_blocks=33).weights is WeightFormat.FLOAT32


def test_memory_is_reckoned_with_the_bytes_of_the_format(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free holds the blocks and one block of KV for each request, and not the same weights in float32."""
    shape = ModelShape.read(quantised)
    taken = weight_bytes(quantised, shape, Execution(CAPTURED, WeightFormat.BLOCKS))
    assert taken < shape.weight_bytes / 5
    free = taken + 13 * 16 * shape.kv_bytes_per_token
    assert free < shape.weight_bytes
    monkeypatch.setattr(config, "available_memory", lambda: free)
    assert EngineConfig.resolve(quantised, num_blocks=13, weights="blocks").weights is WeightFormat.BLOCKS
    for weights in ("float32", "int8"):
        with pytest.raises(ConfigError, match="too little memory: the weights take"):
            EngineConfig.resolve(quantised, num_blocks=13, weights=weights)
