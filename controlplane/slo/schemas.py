"""What the slo domain takes and answers: objectives per tenant × pool × class, and which of them holds for a request.

Layer: service. Pure, torch-free data. Shares are of requests: `ttft_share` 0.95 with `ttft_ms` 500 reads "TTFT ≤ 500 ms
for 95 % of requests". A share of 1 is not allowed: it would leave no error budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

LONGEST_WINDOW_DAYS = 90
CLASS_PATTERN = "^[a-z0-9-]{1,40}$"

Milliseconds = Annotated[int, Meta(ge=1, le=3_600_000, examples=[500])]
FineMilliseconds = Annotated[float, Meta(gt=0, le=3_600_000, examples=[50])]
Share = Annotated[float, Meta(gt=0, lt=1, description="of requests, between 0 and 1", examples=[0.95])]
Days = Annotated[int, Meta(ge=1, le=LONGEST_WINDOW_DAYS, description="of the rolling window", examples=[30])]
Pool = Annotated[str, Meta(min_length=1, max_length=200, description="a pool's name; null for any")]
ServiceClass = Annotated[
    str, Meta(pattern=CLASS_PATTERN, description="a priority class; null for any", examples=["interactive"])
]


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives in force for one tenant (None: all) × pool ("": any) × class ("": any)."""

    slo_id: str
    tenant_id: str | None
    pool: str
    service_class: str
    ttft_ms: int | None
    ttft_share: float | None
    tpot_ms: float | None
    tpot_share: float | None
    availability: float | None
    window_days: int


def slo_for(slos: Iterable[Slo], *, tenant_id: str, pool: str, service_class: str) -> Slo | None:
    """The most specific objectives for a request: the tenant's own before all tenants', then the pool's, then the
    class's. None when nothing is promised.
    """
    holding = [
        slo
        for slo in slos
        if slo.tenant_id in (None, tenant_id) and slo.pool in ("", pool) and slo.service_class in ("", service_class)
    ]
    return max(
        holding, key=lambda slo: (slo.tenant_id is not None, slo.pool != "", slo.service_class != ""), default=None
    )


class SloSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New objectives; at least one of the three. A latency and its share go together."""

    tenant: Annotated[str, Meta(min_length=1, max_length=40, description="a tenant's slug; null for all")] | None = None
    pool: Pool | None = None
    service_class: ServiceClass | None = msgspec.field(default=None, name="class")
    ttft_ms: Milliseconds | None = None
    ttft_share: Share | None = None
    tpot_ms: FineMilliseconds | None = None
    tpot_share: Share | None = None
    availability: Share | None = None
    window_days: Days = 30
    enabled: bool = True


class SloPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is left out stays. Null takes an objective away."""

    ttft_ms: Milliseconds | UnsetType | None = UNSET
    ttft_share: Share | UnsetType | None = UNSET
    tpot_ms: FineMilliseconds | UnsetType | None = UNSET
    tpot_share: Share | UnsetType | None = UNSET
    availability: Share | UnsetType | None = UNSET
    window_days: Days | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


class SloView(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives as operators see them."""

    id: UUID
    tenant: str | None
    pool: str | None
    service_class: str | None = msgspec.field(name="class")
    ttft_ms: int | None
    ttft_share: float | None
    tpot_ms: float | None
    tpot_share: float | None
    availability: float | None
    window_days: int
    enabled: bool
    created_at: datetime
    updated_at: datetime
