"""A checkpoint loads whole and exactly, or is refused with the name of what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from dataplane.errors import CheckpointError
from dataplane.models.gguf_file import GGUFFile
from dataplane.models.loader import load_model
from dataplane.models.registry import Model
from dataplane.models.shape import ModelShape
from tests.factories.models import permute, tiny_config, tiny_weights, write_gguf, write_safetensors


def load(path: Path) -> Model:
    shape = ModelShape.read(path)
    return load_model(path, shape, positions=64, dtype=torch.float32, device=torch.device("cpu"))


def assert_weights(model: Model, expected: dict[str, torch.Tensor]) -> None:
    found = model.weights()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_safetensors_load_exactly_from_one_file_or_shards(tmp_path: Path, shards: int, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    weights = tiny_weights(config)
    assert_weights(load(write_safetensors(tmp_path, config, weights, shards=shards)), weights)


def test_half_precision_safetensors_become_float32(tmp_path: Path) -> None:
    config = tiny_config()
    weights = {name: tensor.bfloat16() for name, tensor in tiny_weights(config).items()}
    assert_weights(
        load(write_safetensors(tmp_path, config, weights)), {name: tensor.float() for name, tensor in weights.items()}
    )


def test_what_older_checkpoints_carry_beside_the_weights_is_no_error(tmp_path: Path) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    more = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert_weights(load(write_safetensors(tmp_path, config, weights | more)), weights)


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_float32_loads_exactly_with_the_rotary_order_undone(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    weights = tiny_weights(config)
    assert_weights(load(write_gguf(tmp_path / "tiny.gguf", config, weights)), weights)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_blocks_become_the_values_they_stand_for(tmp_path: Path, kind: str) -> None:
    config = tiny_config(intermediate_size=128)
    weights = tiny_weights(config)
    quant = GGMLQuantizationType[kind]
    model = load(write_gguf(tmp_path / "tiny.gguf", config, weights, kind=quant))
    for name, tensor in weights.items():
        expected = tensor
        if tensor.ndim == 2:
            heads = {"q": 4, "k": 2}.get(name.split(".")[-2].split("_")[0], 0)
            stored = permute(tensor.numpy(), heads) if heads and "self_attn" in name else tensor.numpy()
            values = dequantize(quantize(stored, quant), quant)
            if heads and "self_attn" in name:
                original = torch.from_numpy(permute(np.arange(len(values), dtype=np.float32)[:, None], heads))
                rows = np.empty_like(values)
                rows[original[:, 0].long().numpy()] = values
                values = rows
            expected = torch.from_numpy(values)
        torch.testing.assert_close(model.weights()[name], expected, rtol=0, atol=0, msg=name)
        assert (expected - tensor).abs().max() < 0.3


def test_rope_factors_of_a_gguf_divide_the_frequencies(tmp_path: Path) -> None:
    config = tiny_config()
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    plain = load(write_gguf(tmp_path / "plain.gguf", config))
    scaled = load(write_gguf(tmp_path / "scaled.gguf", config, extra={"rope_freqs.weight": factors}))
    angles = torch.acos(plain.rotary.cos[1, :8]) / torch.from_numpy(factors)
    torch.testing.assert_close(scaled.rotary.cos[1, :8], torch.cos(angles))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(write_gguf(tmp_path / "tiny.gguf", tiny_config(), leave_out=["blk.1.ffn_up.weight"]))
    weights = tiny_weights(tiny_config())
    del weights["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        load(write_safetensors(tmp_path / "st", tiny_config(), weights))


def test_many_missing_tensors_are_counted_not_listed(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in tiny_weights(tiny_config()).items() if ".mlp." not in name}
    with pytest.raises(CheckpointError, match="and 5 more"):
        load(write_safetensors(tmp_path, tiny_config(), weights))


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not have: blk\.0\.attn_sinks\.weight"):
        load(
            write_gguf(
                tmp_path / "tiny.gguf", tiny_config(), extra={"blk.0.attn_sinks.weight": np.zeros(64, dtype=np.float32)}
            )
        )


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    weights = tiny_weights(tiny_config())
    weights["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 95)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has the shape \(64, 95\), expected \(64, 96\)"):
        load(write_safetensors(tmp_path, tiny_config(), weights))


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.01])
def test_a_truncated_gguf_is_refused_wherever_it_is_cut(tmp_path: Path, keep: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match="truncated"):
        load(path)


def test_every_cut_inside_the_header_is_a_named_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = path.read_bytes()
    for size in range(0, 1500, 7):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            GGUFFile.open(path)


def test_flipped_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = bytearray(path.read_bytes())
    for at in range(4, 1500, 11):
        broken = bytearray(data)
        broken[at] ^= 0xFF
        path.write_bytes(broken)
        try:
            load(path)
        except CheckpointError:
            continue


def entry_of(data: bytes, name: str) -> int:
    """Where the directory entry of tensor `name` says its shape."""
    return data.index(name.encode()) + len(name)


@pytest.mark.parametrize(
    ("at", "value", "size", "sentence"),
    [
        (0, 9, 4, "token_embd.weight has 9 dimensions"),
        (4, 2**62, 8, "truncated: tensor token_embd.weight ends at byte"),
        (12, 0, 8, "token_embd.weight of type F32 has the impossible shape"),
        (20, 999, 4, "token_embd.weight has the unknown type 999"),
        (20, 10, 4, "token_embd.weight is Q2_K; supported types are BF16"),
        (24, 2**63, 8, "truncated: tensor token_embd.weight ends at byte"),
        (24, 16, 8, "token_embd.weight begins at 16, unaligned"),
        (24, 32, 8, "token_embd.weight and output_norm.weight overlap"),
    ],
)
def test_a_lying_tensor_directory_is_refused(tmp_path: Path, at: int, value: int, size: int, sentence: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = path.read_bytes()
    start = entry_of(data, "token_embd.weight") + at
    path.write_bytes(data[:start] + value.to_bytes(size, "little") + data[start + size :])
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        load(path)


@pytest.mark.parametrize(("at", "counted"), [(8, "tensors"), (16, "keys")])
def test_absurd_counts_end_where_the_file_does(tmp_path: Path, at: int, counted: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = path.read_bytes()
    path.write_bytes(data[:at] + (2**63).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        load(path)


def test_names_that_appear_twice_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(CheckpointError, match="of 28 names"):
        load(path)
    path.write_bytes(data.replace(b"llama.rope.freq_base", b"llama.context_length"))
    with pytest.raises(CheckpointError, match=r"has the key llama\.context_length twice"):
        load(path)


def test_whole_numbers_where_weights_belong_are_refused(tmp_path: Path) -> None:
    weights = tiny_weights(tiny_config())
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is of type I8; supported types are BF16"):
        load(write_safetensors(tmp_path, tiny_config(), weights))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, tiny_config(), shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="which another shard holds too"):
        load(folder)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"hidden_act": "relu"}, "the activation relu is not supported for llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised as gptq are not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported for llama"),
        ({"model_type": "gemma", "hidden_act": "gelu", "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"model_type": "mistral", "sliding_window": 0}, "windows"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "1 rope short_factors"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope factor 0"),
    ],
)
def test_what_would_be_computed_otherwise_than_the_checkpoint_says_is_refused(
    tmp_path: Path, overrides: dict[str, object], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load(write_safetensors(tmp_path, tiny_config(**overrides), tiny_weights(tiny_config())))


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path, tiny_config()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cannot read model\.safetensors"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path, tiny_config(), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        load(tmp_path)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path, tiny_config(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load(tmp_path)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"architecture mamba is not supported; supported are: gemma, .*llama"):
        load(write_gguf(tmp_path / "tiny.gguf", tiny_config(), architecture="mamba"))
    with pytest.raises(CheckpointError, match="architecture bert"):
        load(write_safetensors(tmp_path / "st", tiny_config(model_type="bert")))


def test_an_unsupported_quant_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    extra = np.zeros((4, 32), dtype=np.float32)
    write_gguf(path, tiny_config(), extra={"odd.weight": extra})
    data = path.read_bytes()
    at = data.index(b"odd.weight") + len(b"odd.weight") + 4 + 16
    path.write_bytes(data[:at] + int(GGMLQuantizationType.IQ2_XS).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"odd\.weight is IQ2_XS; supported types are"):
        GGUFFile.open(path)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    write_safetensors(tmp_path, tiny_config())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load(path)
