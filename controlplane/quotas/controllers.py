"""Admin API of quotas, raises, prices and requests. Layer: service. Parses and answers; the services decide."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from litestar import Controller, Router, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.paging import LARGEST, Page
from controlplane.quotas import price_service, request_service, service
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import (
    ApprovalSpec,
    DecisionSpec,
    GrantSpec,
    GrantView,
    PriceSpec,
    PriceView,
    QuotaPatch,
    QuotaRequestSpec,
    QuotaRequestView,
    QuotaSpec,
    QuotaView,
    RequestState,
)

BODY_LIMIT = 64 * 1024

Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]
At = Annotated[datetime | None, QueryParameter(description="only those in force at this instant, with its time zone")]
OfPool = Annotated[str | None, QueryParameter(description="only this pool's; empty for the price of every pool")]
Status = Annotated[RequestState | None, QueryParameter(description="only those in this state")]
IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="idempotency-key", min_length=1, max_length=128, description="makes a repeated creation harmless"
    ),
]


class TenantQuotaController(Controller):
    """What one tenant may use, and what it asks for."""

    path = "/tenants/{slug:str}"
    tags = ["quotas"]  # noqa: RUF012 - the framework's own attribute

    @get("/quotas", operation_id="listQuotas", summary="List a tenant's limits, oldest first")
    async def list_quotas(
        self,
        *,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        project: FromQuery[str | None] = None,
        kind: FromQuery[QuotaKind | None] = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[QuotaView]:
        return await service.list_quotas(session, slug, project=project, kind=kind, after=after, limit=limit)

    @post("/quotas", operation_id="createQuota", summary="Limit a tenant, one of its projects or one of its keys")
    async def create_quota(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        data: JSONBody[QuotaSpec],
        idempotency_key: IdempotencyKey = None,
    ) -> QuotaView:
        return await service.create_quota(session, slug, data, idempotency_key=idempotency_key)

    @post("/quota-requests", operation_id="askForQuota", summary="Ask for more of a limit, for the tenant")
    async def ask(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        slug: FromPath[str],
        data: JSONBody[QuotaRequestSpec],
        idempotency_key: IdempotencyKey = None,
    ) -> QuotaRequestView:
        return await request_service.ask(session, slug, data, by=current_user.name, idempotency_key=idempotency_key)


class QuotaController(Controller):
    """Limits by their own id, and their raises."""

    path = "/quotas/{quota_id:uuid}"
    tags = ["quotas"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="getQuota", summary="Show a limit")
    async def get_quota(self, session: NamedDependency[AsyncSession], quota_id: FromPath[UUID]) -> QuotaView:
        return await service.get_quota(session, quota_id)

    @patch(operation_id="changeQuota", summary="Change a limit; what is left out stays")
    async def change_quota(
        self, session: NamedDependency[AsyncSession], quota_id: FromPath[UUID], data: JSONBody[QuotaPatch]
    ) -> QuotaView:
        return await service.change_quota(session, quota_id, data)

    @delete(operation_id="deleteQuota", summary="Remove a limit with its raises", status_code=200)
    async def delete_quota(self, session: NamedDependency[AsyncSession], quota_id: FromPath[UUID]) -> QuotaView:
        return await service.delete_quota(session, quota_id)

    @get("/grants", operation_id="listGrants", summary="List a limit's temporary raises, oldest first")
    async def list_grants(
        self,
        session: NamedDependency[AsyncSession],
        quota_id: FromPath[UUID],
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[GrantView]:
        return await service.list_grants(session, quota_id, after=after, limit=limit)

    @post("/grants", operation_id="createGrant", summary="Raise a limit until an instant")
    async def grant(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        quota_id: FromPath[UUID],
        data: JSONBody[GrantSpec],
        idempotency_key: IdempotencyKey = None,
    ) -> GrantView:
        return await service.grant(session, quota_id, data, by=current_user.name, idempotency_key=idempotency_key)

    @delete("/grants/{grant_id:uuid}", operation_id="endGrant", summary="End a raise now", status_code=200)
    async def end_grant(
        self, session: NamedDependency[AsyncSession], quota_id: FromPath[UUID], grant_id: FromPath[UUID]
    ) -> GrantView:
        return await service.end_grant(session, quota_id, grant_id)


class PriceController(Controller):
    """What use of pools costs, with its history."""

    path = "/prices"
    tags = ["prices"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listPrices", summary="List prices, newest first")
    async def list_prices(
        self,
        session: NamedDependency[AsyncSession],
        pool: OfPool = None,
        at: At = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[PriceView]:
        return await price_service.list_prices(session, pool=pool, at=at, after=after, limit=limit)

    @post(operation_id="setPrice", summary="Set a price; it ends the one before")
    async def set_price(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        data: JSONBody[PriceSpec],
        idempotency_key: IdempotencyKey = None,
    ) -> PriceView:
        return await price_service.set_price(session, data, by=current_user.name, idempotency_key=idempotency_key)

    @get("/{price_id:uuid}", operation_id="getPrice", summary="Show a price")
    async def get_price(self, session: NamedDependency[AsyncSession], price_id: FromPath[UUID]) -> PriceView:
        return await price_service.get_price(session, price_id)

    @delete("/{price_id:uuid}", operation_id="takeBackPrice", summary="Take back a price yet to start", status_code=200)
    async def take_back(self, session: NamedDependency[AsyncSession], price_id: FromPath[UUID]) -> PriceView:
        return await price_service.take_back(session, price_id)


class QuotaRequestController(Controller):
    """What tenants ask for, and what becomes of it."""

    path = "/quota-requests"
    tags = ["quotas"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="listQuotaRequests", summary="List requests for more, oldest first")
    async def list_requests(
        self,
        session: NamedDependency[AsyncSession],
        tenant: FromQuery[str | None] = None,
        status: Status = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[QuotaRequestView]:
        return await request_service.list_requests(session, tenant=tenant, state=status, after=after, limit=limit)

    @get("/{request_id:uuid}", operation_id="getQuotaRequest", summary="Show a request")
    async def get_request(self, session: NamedDependency[AsyncSession], request_id: FromPath[UUID]) -> QuotaRequestView:
        return await request_service.get_request(session, request_id)

    @post(
        "/{request_id:uuid}/approve", operation_id="approveQuotaRequest", summary="Give what is asked", status_code=200
    )
    async def approve(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        request_id: FromPath[UUID],
        data: JSONBody[ApprovalSpec],
    ) -> QuotaRequestView:
        return await request_service.approve(session, request_id, by=current_user.name, given=data)

    @post("/{request_id:uuid}/decline", operation_id="declineQuotaRequest", summary="Give nothing", status_code=200)
    async def decline(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        request_id: FromPath[UUID],
        data: JSONBody[DecisionSpec],
    ) -> QuotaRequestView:
        return await request_service.decline(session, request_id, by=current_user.name, note=data.note)


router = Router(
    "/api/v1",
    route_handlers=[TenantQuotaController, QuotaController, PriceController, QuotaRequestController],
    request_max_body_size=BODY_LIMIT,
)
