"""Admin API of the policy's epoch and history. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Router, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.component import Resources
from controlplane.paging import LARGEST, Page
from controlplane.policy import service
from controlplane.policy.views import ChangeView, PolicyObject, PolicyView

Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]
OfKind = Annotated[PolicyObject | None, QueryParameter(description="only changes of this kind of thing")]


class PolicyController(Controller):
    """Which policy is in force where, and how it came to be."""

    path = "/policy"
    tags = ["policy"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="getPolicy", summary="Show the policy's epoch, and that of every gateway and replica")
    async def policy(self, session: NamedDependency[AsyncSession], resources: NamedDependency[Resources]) -> PolicyView:
        return await service.policy(session, resources.redis, stale_after_s=resources.settings.stale_after_s)

    @get("/changes", operation_id="listPolicyChanges", summary="List changes of the policy, newest first")
    async def changes(
        self,
        *,
        session: NamedDependency[AsyncSession],
        tenant: FromQuery[str | None] = None,
        kind: OfKind = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[ChangeView]:
        return await service.list_changes(session, tenant=tenant, object_=kind, after=after, limit=limit)

    @get("/changes/{change_id:int}", operation_id="getPolicyChange", summary="Show a change")
    async def change(self, session: NamedDependency[AsyncSession], change_id: FromPath[int]) -> ChangeView:
        return await service.get_change(session, change_id)

    @post(
        "/changes/{change_id:int}/rollback",
        operation_id="rollBackPolicyChange",
        summary="Take a change back, unless the row has changed since",
        status_code=200,
    )
    async def roll_back(self, session: NamedDependency[AsyncSession], change_id: FromPath[int]) -> ChangeView:
        return await service.roll_back(session, change_id)


router = Router("/api/v1", route_handlers=[PolicyController])
