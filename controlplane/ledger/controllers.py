"""Admin API of the usage ledger. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from litestar import Controller, Router, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, PathParameter, QueryParameter
from litestar.response import Stream
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.component import Resources
from controlplane.ledger import service
from controlplane.ledger.export import MEDIA_TYPES, export
from controlplane.ledger.schemas import ExportFormat, Statement, UsageDimension, UsageLine, UsageTotal
from controlplane.ledger.statements import statement
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

    @get(
        "/totals",
        operation_id="sumUsage",
        summary="Usage over a span, summed by one dimension",
    )
    async def totals(
        self,
        session: NamedDependency[AsyncSession],
        since: FromQuery[datetime],
        until: FromQuery[datetime],
        by: FromQuery[UsageDimension] = UsageDimension.TENANT,
        tenant: FromQuery[str | None] = None,
    ) -> list[UsageTotal]:
        return await service.usage_totals(session, by=by, since=since, until=until, tenant=tenant)

    @get("/export", operation_id="exportUsage", summary="Attempts that finished in a span, oldest first, as a file")
    async def export_usage(
        self,
        resources: NamedDependency[Resources],
        since: FromQuery[datetime],
        until: FromQuery[datetime],
        format: FromQuery[ExportFormat] = ExportFormat.CSV,
        tenant: FromQuery[str | None] = None,
    ) -> Stream:
        rows = export(resources.engine, format, since=since, until=until, tenant=tenant)
        return Stream(
            rows,
            media_type=MEDIA_TYPES[format],
            headers={"content-disposition": f'attachment; filename="usage.{format}"'},
        )


Month = Annotated[str, PathParameter(description="a calendar month such as 2026-11")]


@get(
    "/tenants/{slug:str}/statements/{month:str}",
    operation_id="getStatement",
    summary="A tenant's usage and cost in a calendar month of its time zone",
    tags=["usage"],
)
async def get_statement(session: NamedDependency[AsyncSession], slug: FromPath[str], month: Month) -> Statement:
    return await statement(session, slug, month, now=datetime.now(UTC))


router = Router("/api/v1", route_handlers=[LedgerController, get_statement])
