"""What a gateway tells the control plane: counts by tenant, pool and replica, and whom it refused.

Layer: service. `protocol` hands its messages on, and says how they may change.
"""

from __future__ import annotations

import msgspec

from dataplane.message import SCHEMA_VERSION, Message
from dataplane.tally import Histogram, Tally


class GatewayCounters(Tally, kw_only=True):
    """`accepted` requests were taken by a replica, or ended otherwise than refused. Each request ends in exactly one
    of `finished` (by OpenAI finish reason), `refused` (by reason), `failed` (by cause) or `cancelled`. TTFT runs from
    acceptance; requests that were not streamed have none. `ttft` is the first token of any kind, `ttft_visible` the
    first that carries text the client shows. `tpot` is (last − first)/(n − 1) per request. `forged` are headers that
    claimed to come from inside and were dropped.
    """

    accepted: int = 0
    finished: dict[str, int] = {}
    refused: dict[str, int] = {}
    failed: dict[str, int] = {}
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: Histogram | None = None
    ttft_visible: Histogram | None = None
    tpot: Histogram | None = None
    itl: Histogram | None = None
    e2e: Histogram | None = None
    forged: int = 0


class GatewaySeries(Message, frozen=True, kw_only=True):
    """One gateway's view of one tenant on one pool and replica, both empty when refused before routing."""

    tenant: str
    pool: str
    replica: str
    counters: GatewayCounters


LATEST_REFUSED = 5
"""Refused requests that one window keeps of one tenant and reason."""


class RefusedRequest(Message, frozen=True, kw_only=True):
    """One refused request as its tenant may read of it; `at` is its arrival in Unix seconds."""

    at: float
    request_id: str
    key_id: str
    message: str


class GatewayRefusals(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tenant's requests that a gateway refused for one reason: `quota_id` and `kind` name the limit that was in the
    way and are empty for other reasons. `latest` are the last `LATEST_REFUSED` of them.
    """

    tenant: str
    code: str
    quota_id: str = ""
    kind: str = ""
    count: int = 0
    latest: list[RefusedRequest] = []


class GatewayWindow(Message, frozen=True, kw_only=True):
    start: int
    series: list[GatewaySeries] = []
    refusals: list[GatewayRefusals] = []


class GatewayReport(Message, frozen=True, kw_only=True):
    """Gateway → control plane, about one a second, with the same acknowledgement rules as `Report`."""

    schema_version: int = SCHEMA_VERSION
    gateway: str
    boot_epoch: int
    sequence: int
    acknowledged: int
    full: bool = False
    sent_at: float
    started_at: float
    policy_epoch: int = 0
    in_flight: int = 0
    spool_bytes: int = 0
    """Usage on the gateway's disk that is not known to be in the ledger. `spool_oldest_at`: since when, 0 for none."""
    spool_oldest_at: float = 0.0
    spool_full: bool = False
    windows: list[GatewayWindow] = []
