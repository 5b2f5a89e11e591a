"""What a replica counts, layer by layer. Counters only grow within one boot.

Layer: service. Wire structs without torch or I/O; `dataplane.protocol` offers them on, so that the control plane finds
everything there. Fields may be added with a default; none is renamed, retyped or removed (see there).
"""

from __future__ import annotations

import msgspec

from dataplane.tally import Histogram, Tally


class ServiceCounters(Tally, kw_only=True):
    received: int = 0
    finished: dict[str, int] = {}
    ttft: Histogram | None = None
    tpot: Histogram | None = None
    itl: Histogram | None = None
    itl_with_prefill: Histogram | None = None
    e2e: Histogram | None = None
    queue: Histogram | None = None
    prefill: Histogram | None = None
    decode: Histogram | None = None


class TenantService(Tally, kw_only=True):
    """What one tenant was served by this replica."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kv_block_seconds: float = 0.0
    device_seconds: float = 0.0
    finished: int = 0


class SchedulingCounters(Tally, kw_only=True):
    steps: int = 0
    tokens_scheduled: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_budget: int = 0
    wasted_tokens: int = 0
    """Tokens computed for requests that had ended by the time their step came back."""
    preemptions: dict[str, int] = {}
    tenants: dict[str, TenantService] = {}


class MemoryCounters(Tally, kw_only=True):
    """Prefix lookups in tokens. A first attempt and a recompute after preemption are never mixed.

    Hits are what this replica's own cache held, on the device or in host memory, and nothing loaded from elsewhere.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    recompute_queries: int = 0
    recompute_hits: int = 0
    evictions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    out_of_memory: int = 0
    host_hits: int = 0
    """Tokens of `prefix_hits` that came from host memory."""
    offloaded: int = 0
    """Blocks whose contents went to host memory when they were evicted."""
    copied: int = 0
    """Blocks copied because a shared one was written to."""
    remote_hits: int = 0
    """Tokens of first attempts that were loaded from elsewhere, after those of `prefix_hits`."""


class ProposerCounters(Tally, kw_only=True):
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = []


class AlgorithmCounters(Tally, kw_only=True):
    speculation: dict[str, ProposerCounters] = {}
    expert_tokens: list[list[int]] = []


class RuntimeCounters(Tally, kw_only=True):
    """Seconds of step time by part, and what the steps should have cost (configured) beside it."""

    schedule_s: float = 0.0
    prepare_s: float = 0.0
    launch_s: float = 0.0
    forward_s: float = 0.0
    sync_s: float = 0.0
    sample_s: float = 0.0
    post_s: float = 0.0
    idle_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    step_time: Histogram | None = None


class Collective(Tally, kw_only=True):
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class ParallelismCounters(Tally, kw_only=True):
    collectives: dict[str, Collective] = {}
    overlapped_s: float = 0.0
    rank_skew_s: float = 0.0
    kv_transfers: int = 0
    kv_transfer_bytes: int = 0
    migrations: int = 0


class Counters(Tally, kw_only=True):
    """Everything that is counted, by layer."""

    service: ServiceCounters = msgspec.field(default_factory=ServiceCounters)
    scheduling: SchedulingCounters = msgspec.field(default_factory=SchedulingCounters)
    memory: MemoryCounters = msgspec.field(default_factory=MemoryCounters)
    algorithm: AlgorithmCounters = msgspec.field(default_factory=AlgorithmCounters)
    runtime: RuntimeCounters = msgspec.field(default_factory=RuntimeCounters)
    parallelism: ParallelismCounters = msgspec.field(default_factory=ParallelismCounters)
