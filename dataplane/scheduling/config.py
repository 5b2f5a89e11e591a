"""The scheduler's configuration. Layer: scheduling. Pure; `EngineConfig` holds and validates it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Batching(enum.StrEnum):
    """When waiting requests may join those that run."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    DYNAMIC = "dynamic"
    SELECTIVE = "selective"


class Capacity(enum.StrEnum):
    """How many KV blocks an admission takes: those its tokens need now, or those it may ever need."""

    ON_DEMAND = "on_demand"
    RESERVE_MAX = "reserve_max"


class Preemption(enum.StrEnum):
    """How a request that lost its blocks gets its KV back; `auto` takes what is quicker for its length."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class QueueOrder(enum.StrEnum):
    """Who waits at the head, within one priority."""

    FCFS = "fcfs"
    FAIR_TAG = "fair_tag"
    CACHE_AWARE = "cache_aware"
    VTC = "vtc"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may do."""

    max_num_seqs: int = 128
    """Requests running at once."""
    max_num_batched_tokens: int = 512
    """The token budget of one step: how long a running request can be held up by others' prefill."""
    long_prefill_threshold: int = 0
    """The most prompt tokens of one request in one step; 0 leaves it to the budget."""
    watermark: float = 0.01
    """Share of the blocks that an admission must leave free, so that running requests can grow."""
    max_waiting: int = 4096
    """Requests waiting at once; one more is refused."""
    batching: Batching = Batching.CONTINUOUS
    batch_size: int = 0
    """Requests in a static or dynamic batch; 0 takes `max_num_seqs`."""
    batch_window_s: float = 0.05
    """How long a dynamic batch waits for more requests."""
    bucket_ageing_s: float = 1.0
    """Once a request has waited so long, the bucket of the queue's head is served, whatever the others hold
    (selective)."""
    capacity: Capacity = Capacity.ON_DEMAND
    preemption: Preemption = Preemption.RECOMPUTE
    swap_bytes_per_s: float = 8e9
    """Host link for `auto`: swap where moving a request's KV out and in is quicker than computing it again."""
    prefill_tokens_per_s: float = 1e4
    """Prefill speed for `auto`, until the engine has measured its own."""
    order: QueueOrder = QueueOrder.FAIR_TAG
    input_charge: float = 1.0
    """What a prompt token that is computed counts for in a tenant's service (vtc)."""
    cached_charge: float = 0.25
    """What a prompt token found in the prefix cache counts for (vtc)."""
    output_charge: float = 2.0
    """What a generated token counts for (vtc)."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of service among tenants that wait; who is not named has 1 (vtc)."""
    steps_in_flight: int = 1
    """Steps planned before the result of the first is in: 2 overlaps planning with execution."""
