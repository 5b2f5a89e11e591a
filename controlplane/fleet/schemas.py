"""What the fleet service answers to other domains. Layer: service."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dataplane.protocol import CoreReady, Gauges, ReplicaState

LOAD_CHANNEL = "tidegate:load"
"""Redis pub/sub: one msgpack `ReplicaLoad` for every report taken in."""


class PoolRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A pool serves one model name to tenants; `backend` is an adapter's name (`native`). `replica_slots` and
    `replica_tokens` are what an operator says a replica holds, requests and KV tokens; 0 leaves it to the replica.
    """

    name: str
    model: str
    backend: str
    created_at: float
    replica_slots: int = 0
    replica_tokens: int = 0


class PoolPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each replica of a pool holds at once, requests and KV tokens; 0 is what the replica says itself."""

    replica_slots: Annotated[int, Meta(ge=0, le=1_000_000, examples=[16])] | UnsetType = UNSET
    replica_tokens: Annotated[int, Meta(ge=0, le=2**40, examples=[65536])] | UnsetType = UNSET


class ReplicaRoute(msgspec.Struct, frozen=True, kw_only=True):
    """`context` is the most tokens of a prompt and its answer together, 0 when the replica has not told; the
    same holds for `slots`, the requests that it holds at once, and `tokens`, its KV cache.
    """

    replica: str
    pool: str
    url: str
    state: ReplicaState
    boot_epoch: int
    context: int = 0
    slots: int = 0
    tokens: int = 0


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """Pools and replicas as of policy `epoch`."""

    epoch: int
    pools: list[PoolRoute]
    replicas: list[ReplicaRoute]


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's load as of its last report."""

    replica: str
    at: float
    state: ReplicaState
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    credits: int = 0
    """Requests that it says it holds at once, 0 when it does not."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the Replicas page. `age_s` is the time since the last report, None before the first."""

    replica: str
    pool: str
    model: str
    url: str
    state: ReplicaState
    state_reason: str
    state_since: float
    age_s: float | None
    boot_epoch: int
    core_epoch: int
    core_restarts: int
    started_at: float | None
    policy_epoch: int
    ready: CoreReady | None
    gauges: Gauges | None
