"""The gateways that report, as of their newest reports. Layer: service. One query."""

from __future__ import annotations

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.telemetry.models import Gateway

MOST = 1_000


class GatewayView(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway; `age_s` is the time since its last report by the database's clock."""

    gateway: str
    policy_epoch: int
    in_flight: int
    age_s: float


async def gateways(session: AsyncSession) -> list[GatewayView]:
    """Gateways by name, at most `MOST`."""
    age = func.extract("epoch", func.clock_timestamp() - Gateway.last_report_at)
    rows = await session.execute(
        select(Gateway.id, Gateway.policy_epoch, Gateway.in_flight, age).order_by(Gateway.id).limit(MOST)
    )
    return [
        GatewayView(gateway=name, policy_epoch=epoch, in_flight=running, age_s=max(0.0, float(seconds)))
        for name, epoch, running, seconds in rows
    ]
