"""The Usage pages: what all tenants used in a month, and one tenant's statement with its rows to download.

Layer: service. The ledger's services sum; every number here is theirs. A long list is cut and its last line says what
the rest comes to, so that the lines still add up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery
from litestar.response import Stream
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.component import Resources
from controlplane.console.pages import AnyRequest, Console
from controlplane.console.usage import UsageRow, month_of_now, months_around, rows_of
from controlplane.fleet.service import served_models
from controlplane.ledger import service as ledger
from controlplane.ledger.export import MEDIA_TYPES, export
from controlplane.ledger.schemas import ExportFormat, Statement, UsageDimension
from controlplane.ledger.spans import month_of
from controlplane.ledger.statements import statement
from controlplane.telemetry.completeness import completeness
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import PROBE_TENANT

BREAKDOWNS = (
    ("project", "Projects", "by_project"),
    ("key", "Keys", "by_key"),
    ("model", "Models", "by_model"),
    ("pool", "Pools", "by_pool"),
    ("basis", "How it was counted", "by_basis"),
)


@get("/usage", include_in_schema=False)
async def usage(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    month: FromQuery[str | None] = None,
) -> Response[str]:
    now = datetime.now(UTC)
    chosen = month or month_of_now(now, "UTC")
    span = month_of(chosen, ZoneInfo("UTC"))
    assert span.until is not None
    totals = await ledger.usage_totals(session, by=UsageDimension.TENANT, since=span.since, until=span.until)
    return console.answer(
        request,
        "usage/overview.html",
        user=current_user,
        section="usage",
        month=chosen,
        months=months_around(chosen, now, "UTC"),
        rows=[row._replace(probe=row.key == PROBE_TENANT) for row in rows_of([(one.key, one) for one in totals])],
    )


@get("/usage/arriving", include_in_schema=False)
async def arriving(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
) -> Response[str]:
    now = time.time()
    state = await completeness(session, now)
    return console.answer(request, "usage/arriving.html", user=current_user, section="usage", state=state, now=now)


@get("/tenants/{slug:str}/usage", include_in_schema=False)
async def tenant_usage(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    month: FromQuery[str | None] = None,
) -> Response[str]:
    now = datetime.now(UTC)
    tenant = await tenants.get_tenant(session, slug)
    chosen = month or month_of_now(now, tenant.time_zone)
    found = await statement(session, slug, chosen, now=now)
    return console.answer(
        request,
        "usage/tenant.html",
        user=current_user,
        section="tenants",
        tab="usage",
        tenant=tenant,
        served=await served_models(session),
        statement=found,
        months=months_around(chosen, now, tenant.time_zone),
        breakdowns=_breakdowns(found),
        lines=_lines(found),
    )


@get("/tenants/{slug:str}/usage/export", include_in_schema=False)
async def export_usage(
    *,
    session: NamedDependency[AsyncSession],
    resources: NamedDependency[Resources],
    slug: FromPath[str],
    month: FromQuery[str],
    format: FromQuery[ExportFormat] = ExportFormat.CSV,
) -> Stream:
    span = month_of(month, ZoneInfo(await tenants.time_zone_of(session, slug)))
    assert span.until is not None
    rows = export(resources.engine, format, since=span.since, until=span.until, tenant=slug)
    name = f"usage-{slug}-{month}.{format}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Stream(rows, media_type=MEDIA_TYPES[format], headers=headers)


PAGES: list[Any] = [usage, arriving, tenant_usage, export_usage]


def _breakdowns(found: Statement) -> list[tuple[str, str, Sequence[UsageRow]]]:
    return [
        (name, title, rows_of([(part.key, part) for part in getattr(found, field)]))
        for name, title, field in BREAKDOWNS
    ]


def _lines(found: Statement) -> Sequence[UsageRow]:
    return rows_of([("", line) for line in found.lines], details=[
        (line.project, line.key_id, line.model, line.pool) for line in found.lines
    ])  # fmt: skip
