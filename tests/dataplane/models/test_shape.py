"""Geometry is read from both kinds of files, counted exactly, and impossible numbers are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.config import find_model
from dataplane.errors import CheckpointError
from dataplane.models.gguf_file import GGUFFile
from dataplane.models.loader import load_model
from dataplane.models.shape import ModelShape
from tests.factories.families import LONG, config_of
from tests.factories.models import tiny_config, write_gguf, write_safetensors


def test_both_kinds_of_file_tell_the_same(tmp_path: Path) -> None:
    config = tiny_config()
    one = ModelShape.read(write_gguf(tmp_path / "tiny.gguf", config))
    two = ModelShape.read(write_safetensors(tmp_path / "folder", config))
    assert dataclasses.replace(one, rms_eps=two.rms_eps) == two
    assert one.rms_eps == pytest.approx(two.rms_eps)


def test_the_numbers_of_the_packaged_model() -> None:
    shape = ModelShape.read(find_model("smollm2")[0])
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim) == (30, 576, 9, 3, 64)
    assert shape.layer_parameters + shape.head_parameters == 134_479_872
    assert shape.kv_bytes_per_token == 46_080


def test_weights_and_steps_cost_what_the_formulas_say(tmp_path: Path) -> None:
    """Counted on the loaded tensors; a step of two tokens with three pairs by hand."""
    path = write_safetensors(tmp_path, tiny_config(tie_word_embeddings=False))
    shape = ModelShape.read(path)
    model = load_model(path, shape, positions=8, dtype=torch.float32, device=torch.device("cpu"))
    matrices = sum(tensor.nbytes for tensor in model.weights().values() if tensor.ndim == 2)
    assert shape.weight_bytes == matrices
    assert shape.step_flops(2, 3, 1) == 2 * 2 * shape.layer_parameters + 4 * 3 * 4 * 16 * 3 + 2 * 64 * 128


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"num_attention_heads": 0}, "damaged"),
        ({"num_hidden_layers": 0}, "layers 0"),
        ({"num_key_value_heads": 3}, "4 heads over 3 key heads"),
        ({"head_dim": 15}, "odd head size 15"),
        ({"vocab_size": -5}, "vocab -5"),
        ({"rms_norm_eps": -1.0}, "rms_eps -1.0"),
        ({"rope_theta": -2.0}, "rope_theta -2.0"),
        ({"hidden_size": "many"}, "damaged"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope scaling spiral is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
    ],
)
def test_impossible_metadata_is_refused(tmp_path: Path, overrides: dict[str, Any], sentence: str) -> None:
    folder = write_safetensors(tmp_path, tiny_config(), {})
    (folder / "config.json").write_text(json.dumps(tiny_config(**overrides)))
    with pytest.raises(CheckpointError, match=sentence):
        ModelShape.read(folder)


def test_more_layers_than_tensors_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, tiny_config())
    shape = dataclasses.replace(ModelShape.read(path), layers=2**40)
    with pytest.raises(CheckpointError, match="claims 1099511627776 layers"):
        load_model(path, shape, positions=8, dtype=torch.float32, device=torch.device("cpu"))


def test_nested_arrays_and_a_zero_alignment_are_damage(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = path.read_bytes()
    key = b"llama.block_count"
    at = data.index(key) + len(key)
    nested = (9).to_bytes(4, "little") * 2 + (1).to_bytes(8, "little")
    path.write_bytes(data[:at] + nested + data[at + 8 :])
    with pytest.raises(CheckpointError, match="unknown array type 9"):
        GGUFFile.open(path)
    writer_key = b"llama.context_length"
    at = data.index(writer_key)
    value = data[at + len(writer_key) : at + len(writer_key) + 4] + (0).to_bytes(4, "little")
    entry = (17).to_bytes(8, "little") + b"general.alignment" + value
    path.write_bytes(data[: at - 8] + entry + data[at + len(writer_key) + 8 :])
    with pytest.raises(CheckpointError, match="its alignment is 0"):
        GGUFFile.open(path)


OLDER: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama-yarn": (
        ("rope_parameters",),
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": (("rope_parameters", "head_dim"), {"rope_theta": 1e4}),
    "qwen2-window": (("rope_parameters", "layer_types"), {"rope_theta": 1e4}),
    "gemma": (("rope_parameters", "hidden_act"), {"rope_theta": 1e4, "hidden_act": "gelu", "hidden_activation": None}),
    "gemma2": (("rope_parameters", "layer_types"), {"rope_theta": 1e4}),
    "gemma3": (
        ("rope_parameters", "layer_types"),
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "phi": (("rope_parameters",), {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "phi3-long": (("rope_parameters",), {"rope_theta": 1e4, "rope_scaling": {**LONG, "type": "su", "rope_type": None}}),
}
"""What checkpoints made before transformers 5 lack, and what they say in its place."""


@pytest.mark.parametrize("variant", OLDER)
def test_older_spellings_say_the_same(tmp_path: Path, variant: str) -> None:
    config_of(variant).save_pretrained(tmp_path)
    today = ModelShape.read(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    gone, instead = OLDER[variant]
    kept = {key: value for key, value in config.items() if key not in gone}
    (tmp_path / "config.json").write_text(json.dumps({**kept, **instead}))
    assert ModelShape.read(tmp_path) == today
    assert today.rope_scaling is None or today.rope_scaling.factor > 0


def test_defaults_of_a_family_are_filled_in(tmp_path: Path) -> None:
    """Gemma's first files leave out what transformers fills in."""
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_config(model_type="gemma2", hidden_act="gelu_pytorch_tanh"), "head_dim": None})
    )
    shape = ModelShape.read(tmp_path)
    assert (shape.head_dim, shape.attention_softcap, shape.logit_softcap) == (256, 50.0, 30.0)
    assert shape.windows == (4096, None, 4096)
    assert shape.scale == 1 / 16
