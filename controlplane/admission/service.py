"""Share plans: which are in force. Layer: service. Takes the caller's session and never commits."""

from __future__ import annotations

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admission import repository
from controlplane.admission.shares import SharePlan

_read = msgspec.msgpack.Decoder(SharePlan).decode


async def load_plans(session: AsyncSession) -> list[SharePlan]:
    """Every pool's plan in force. One query."""
    return [_read(row.plan) for row in await repository.plans(session)]
