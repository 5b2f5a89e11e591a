"""Configuration is resolved before anything is built, or refused in one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dataplane import config
from dataplane.config import ConfigError, EngineConfig, find_model
from dataplane.scheduling.config import Batching, Capacity, Preemption
from tests.factories.models import tiny_config, write_gguf, write_safetensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("tiny-model"), tiny_config())


def test_the_packaged_model_resolves_to_values() -> None:
    resolved = EngineConfig.resolve("smollm2")
    assert resolved.model.name == "smollm2-135m-instruct"
    assert resolved.model.max_model_len == 8192
    assert resolved.model.shape.kv_bytes_per_token == 46_080
    assert resolved.cache.num_blocks <= 2048
    assert resolved.threads >= 1
    assert (resolved.device, resolved.dtype) == ("cpu", "float32")


def test_files_and_folders_name_themselves(folder: Path, tmp_path: Path) -> None:
    assert EngineConfig.resolve(folder).model.name == folder.name
    file = write_gguf(tmp_path / "My-Model.gguf", tiny_config())
    assert EngineConfig.resolve(str(file)).model.name == "my-model"
    assert EngineConfig.resolve(file, name="served").model.name == "served"


def test_a_small_pool_shortens_the_context(folder: Path) -> None:
    assert EngineConfig.resolve(folder, num_blocks=11).model.max_model_len == 160
    assert EngineConfig.resolve(folder, num_blocks=11, block_size=4).model.max_model_len == 40


def test_the_pool_follows_the_memory_that_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = EngineConfig.resolve(folder).model.shape
    block = shape.kv_bytes_per_token * 16
    monkeypatch.setattr(config, "available_memory", lambda: shape.weight_bytes + 4 * 40 * block + block)
    assert EngineConfig.resolve(folder).cache.num_blocks == 40
    with pytest.raises(ConfigError, match=r"too little memory: .* room for 40 KV blocks where 41 are needed"):
        EngineConfig.resolve(folder, max_model_len=640)
    monkeypatch.setattr(config, "available_memory", lambda: shape.weight_bytes // 2)
    with pytest.raises(ConfigError, match="too little memory"):
        EngineConfig.resolve(folder)


def test_the_weights_and_a_block_for_each_request_must_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the pool is chosen or given: memory that is not there is found before anything is loaded."""
    shape = EngineConfig.resolve(folder).model.shape
    block = shape.kv_bytes_per_token * 16
    monkeypatch.setattr(config, "available_memory", lambda: shape.weight_bytes + 50 * block)
    sentence = "room for 50 KV blocks where 101 are needed, one for each request"
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig.resolve(folder, max_num_seqs=100)
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig.resolve(folder, max_num_seqs=100, num_blocks=200)
    assert EngineConfig.resolve(folder, max_num_seqs=49, num_blocks=200).cache.num_blocks == 200
    assert EngineConfig.resolve(folder, max_num_seqs=100, num_blocks=50).cache.num_blocks == 50
    monkeypatch.setattr(config, "available_memory", lambda: shape.weight_bytes // 2)
    with pytest.raises(ConfigError, match="room for 0 KV blocks where 12 are needed"):
        EngineConfig.resolve(folder, num_blocks=12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_model_len": 513}, "max_model_len must be between 2 and the model's context of 512"),
        ({"max_model_len": 1}, "max_model_len must be between 2"),
        ({"batching": "cunning"}, "batching must be one of continuous, static, dynamic, selective, got 'cunning'"),
        ({"batch_size": -1}, "batch_size must not be negative"),
        ({"batch_window_s": float("inf")}, "batch_window_s must be finite"),
        ({"swap_bytes_per_s": 0}, "swap_bytes_per_s must be positive"),
        ({"steps_in_flight": 3}, "steps_in_flight must be 1 or 2, got 3"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"host_blocks": -1}, "host_blocks must not be negative"),
        ({"max_logprobs": 129}, "max_logprobs must be between 0 and the vocabulary's 128"),
        ({"num_blocks": 4, "max_model_len": 64}, "holds 48 tokens, fewer than one request of max_model_len 64"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be between 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"long_prefill_threshold": -1}, "long_prefill_threshold must not be negative"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\)"),
        ({"max_waiting": 0}, "max_waiting must be at least 1"),
        ({"output_charge": -1.0}, "output_charge must be finite and not negative"),
        ({"cached_charge": float("nan")}, "cached_charge must be finite"),
        ({"tenant_weights": {"acme": 0.0}}, "the weight of tenant 'acme' must be positive"),
        ({"device": "tpu"}, "device 'tpu' is not supported"),
        ({"dtype": "float8"}, "dtype 'float8' is not supported"),
        ({"threads": -1}, "threads must be at least 1"),
        ({"no_such_option": 1}, "unknown engine option: no_such_option"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(folder: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig.resolve(folder, **options)


def test_models_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no model at .*nowhere"):
        EngineConfig.resolve(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json"):
        EngineConfig.resolve(tmp_path)
    monkeypatch.setattr(config, "PACKAGED", {"absent": ("no_such_package", "absent")})
    with pytest.raises(ConfigError, match="needs the package no-such-package, which is not installed"):
        find_model("absent")


def test_a_configuration_is_frozen(folder: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig.resolve(folder).threads = 9  # type: ignore[misc]  # that is the point


def test_a_mode_may_be_given_by_name(folder: Path) -> None:
    scheduler = EngineConfig.resolve(folder, batching="static", capacity="reserve_max", preemption="auto").scheduler
    assert scheduler.batching is Batching.STATIC
    assert scheduler.capacity is Capacity.RESERVE_MAX
    assert scheduler.preemption is Preemption.AUTO
