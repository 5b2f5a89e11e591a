"""Admin API of the usage ledger. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from litestar import Controller, Router, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.ledger import service
from controlplane.ledger.schemas import UsageDimension, UsageLine, UsageTotal
from controlplane.paging import LARGEST, Page

Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]


class LedgerController(Controller):
    """What was used: attempt by attempt, and in sum."""

    path = "/usage"
    tags = ["usage"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listUsage", summary="List attempts that finished in a span, newest first")
    async def list_usage(
        self,
        *,
        session: NamedDependency[AsyncSession],
        since: FromQuery[datetime | None] = None,
        until: FromQuery[datetime | None] = None,
        tenant: FromQuery[str | None] = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[UsageLine]:
        return await service.usage_page(session, since=since, until=until, tenant=tenant, after=after, limit=limit)

    @get("/totals", operation_id="sumUsage", summary="Usage over a span by tenant, model or key")
    async def totals(
        self,
        session: NamedDependency[AsyncSession],
        since: FromQuery[datetime],
        until: FromQuery[datetime],
        by: FromQuery[UsageDimension] = UsageDimension.TENANT,
        tenant: FromQuery[str | None] = None,
    ) -> list[UsageTotal]:
        return await service.usage_totals(session, by=by, since=since, until=until, tenant=tenant)


router = Router("/api/v1", route_handlers=[LedgerController])
