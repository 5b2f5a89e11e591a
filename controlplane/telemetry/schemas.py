"""What the telemetry service answers: figures with their evidence, rows and series.

Layer: service. A figure that has no observation is None, never 0; a series has None where no report came.
"""

from __future__ import annotations

import msgspec

from controlplane.evidence import Evidence
from dataplane.protocol import CoreReady


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """p50, p95 and p99 of one histogram in seconds; None without samples."""

    n: int
    p50: Evidence | None = None
    p95: Evidence | None = None
    p99: Evidence | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One scope's figures over one window.

    Gateway side (client's view): `request_rate` (accepted/s: taken by a replica; a request refused by gateway or
    replica, with or without a usable key, is in `refused` only), `ttft`, `ttft_visible`, `tpot`, `e2e`,
    `prompt_rate`, `output_rate` (tokens/s), `prefix_hit` (cached ÷ prompt tokens of finished requests).
    Engine side: `engine_ttft`, `engine_tpot`, `engine_prefix_hit` (first attempts), `kv_used` (used ÷ total
    blocks), `kv_waste` (empty ÷ allocated slots), `running`, `waiting`. The sides are never averaged together.
    `forged` counts headers, not requests: those that claimed to come from inside, dropped by the gateways.
    """

    request_rate: Evidence | None = None
    prompt_rate: Evidence | None = None
    output_rate: Evidence | None = None
    prefix_hit: Evidence | None = None
    ttft: Quantiles
    ttft_visible: Quantiles
    tpot: Quantiles
    e2e: Quantiles
    engine_ttft: Quantiles
    engine_tpot: Quantiles
    engine_prefix_hit: Evidence | None = None
    kv_used: Evidence | None = None
    kv_waste: Evidence | None = None
    running: Evidence | None = None
    waiting: Evidence | None = None
    accepted: int = 0
    finished: dict[str, int] = {}
    refused: dict[str, int] = {}
    failed: dict[str, int] = {}
    cancelled: int = 0
    forged: int = 0


class ScopedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one replica or one tenant; `state` and `ready`, what its core last said of itself, are a replica's."""

    key: str
    label: str
    state: str = ""
    ready: CoreReady | None = None
    figures: Figures


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Aligned 10 s points for charts; every list has the length of `at` (Unix seconds), None is a gap."""

    at: list[int]
    request_rate: list[float | None]
    ttft_p50: list[float | None]
    ttft_p95: list[float | None]
    ttft_p99: list[float | None]
    tpot_p50: list[float | None]
    tpot_p95: list[float | None]
    tpot_p99: list[float | None]
    prompt_rate: list[float | None]
    output_rate: list[float | None]
    kv_used: list[float | None]
    prefix_hit: list[float | None]


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All the Overview page shows. `as_of` Unix seconds; `last_report_at` None before the first report."""

    as_of: float
    window_s: int
    last_report_at: float | None
    total: Figures
    by_replica: list[ScopedFigures]
    by_tenant: list[ScopedFigures]
    series: Series


class GatewaySpool(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway has on its disk, as of its last report. Times are Unix seconds."""

    gateway: str
    waiting_bytes: int
    oldest_at: float | None
    full: bool
    heard_at: float


class Completeness(msgspec.Struct, frozen=True, kw_only=True):
    """`complete_until` (Unix seconds): attempts that ended before are all in the ledger, as far as reporters are heard.

    `held` attempts wait for their replica's own count.
    """

    complete_until: float
    held: int
    gateways: list[GatewaySpool]
