"""Admin API of canaries. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Router, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.canaries import service
from controlplane.canaries.schemas import CanaryRun, CanaryView
from controlplane.component import Resources
from controlplane.paging import LARGEST, Page

Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]


class CanaryController(Controller):
    """When each limit was last proven."""

    path = "/canaries"
    tags = ["canaries"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listCanaries", summary="List canaries, by gateway, endpoint, level and kind")
    async def list_canaries(
        self,
        session: NamedDependency[AsyncSession],
        resources: NamedDependency[Resources],
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[CanaryView]:
        every_s = resources.settings.canary_every_s
        return await service.list_canaries(session, every_s=every_s, after=after, limit=limit)

    @post("/run", operation_id="runCanaries", summary="Run all canaries now, beside the schedule", status_code=202)
    async def run(self, session: NamedDependency[AsyncSession]) -> CanaryRun:
        return await service.ask(session)


router = Router("/api/v1", route_handlers=[CanaryController])
