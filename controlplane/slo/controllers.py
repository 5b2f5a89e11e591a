"""Admin API of service level objectives. Layer: service. Parses and answers; the service decides."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from litestar import Controller, Router, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.paging import LARGEST, Page
from controlplane.slo import service
from controlplane.slo.schemas import SloPatch, SloSpec, SloView

BODY_LIMIT = 64 * 1024

Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]
IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="idempotency-key", min_length=1, max_length=128, description="makes a repeated creation harmless"
    ),
]


class SloController(Controller):
    """Objectives per tenant × pool × class."""

    path = "/slos"
    tags = ["slos"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listSlos", summary="List objectives, oldest first; with tenant, that tenant's own")
    async def list_slos(
        self,
        session: NamedDependency[AsyncSession],
        tenant: FromQuery[str | None] = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[SloView]:
        return await service.list_slos(session, tenant=tenant, after=after, limit=limit)

    @post(operation_id="createSlo", summary="Promise something to a tenant or all, on a pool or any, in a class or any")
    async def create_slo(
        self,
        session: NamedDependency[AsyncSession],
        data: JSONBody[SloSpec],
        idempotency_key: IdempotencyKey = None,
    ) -> SloView:
        return await service.create_slo(session, data, idempotency_key=idempotency_key)

    @get("/{slo_id:uuid}", operation_id="getSlo", summary="Show objectives")
    async def get_slo(self, session: NamedDependency[AsyncSession], slo_id: FromPath[UUID]) -> SloView:
        return await service.get_slo(session, slo_id)

    @patch("/{slo_id:uuid}", operation_id="changeSlo", summary="Change objectives; what is left out stays")
    async def change_slo(
        self, session: NamedDependency[AsyncSession], slo_id: FromPath[UUID], data: JSONBody[SloPatch]
    ) -> SloView:
        return await service.change_slo(session, slo_id, data)

    @delete("/{slo_id:uuid}", operation_id="deleteSlo", summary="Remove objectives", status_code=200)
    async def delete_slo(self, session: NamedDependency[AsyncSession], slo_id: FromPath[UUID]) -> SloView:
        return await service.delete_slo(session, slo_id)


router = Router("/api/v1", route_handlers=[SloController], request_max_body_size=BODY_LIMIT)
