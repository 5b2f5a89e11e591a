"""Admin API of the opt-in request log, and where gateways deliver. Layer: service. The service decides."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, Response, Router, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.errors import InvalidRequestError
from controlplane.paging import LARGEST, Page
from controlplane.promptlog import service
from controlplane.promptlog.schemas import Delivered, Delivery, EntryText, EntryView, PromptLogView, ReadView
from controlplane.tenants.schemas import PromptLogging
from dataplane.protocol import encode

BODY_LIMIT = 64 * 1024

Limit = Annotated[int, QueryParameter(ge=1, le=LARGEST, description="rows in this page")]

_DELIVERY = msgspec.msgpack.Decoder(Delivery)


@post("/internal/v1/logged-requests", status_code=200, operation_id="takeLoggedRequests", include_in_schema=False)
async def take_logged_requests(
    request: Request[Any, Any, Any], session: NamedDependency[AsyncSession]
) -> Response[bytes]:
    """A gateway's `Delivery`, answered by `Delivered`; the transaction commits before the answer leaves."""
    try:
        delivery = _DELIVERY.decode(await request.body())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise InvalidRequestError("this is not a readable delivery", code="delivery_unreadable") from None
    stored = await service.store(session, delivery.entries)
    return Response(encode(Delivered(stored=stored)), media_type="application/msgpack")


class PromptLogController(Controller):
    """Prompts and answers that a tenant has asked to be kept."""

    path = "/tenants/{slug:str}/prompt-log"
    tags = ["prompt log"]  # noqa: RUF012 - the framework's own attribute

    @get(operation_id="getPromptLog", summary="Show whether a tenant's prompts are kept, and how")
    async def show(self, session: NamedDependency[AsyncSession], slug: FromPath[str]) -> PromptLogView:
        return await service.show(session, slug)

    @put(operation_id="turnPromptLogOn", summary="Keep a tenant's prompts and answers, redacted, for some days")
    async def turn_on(
        self, session: NamedDependency[AsyncSession], slug: FromPath[str], data: JSONBody[PromptLogging]
    ) -> PromptLogView:
        return await service.turn_on(session, slug, data)

    @delete(operation_id="turnPromptLogOff", summary="Keep nothing any more and delete what was kept", status_code=200)
    async def turn_off(self, session: NamedDependency[AsyncSession], slug: FromPath[str]) -> PromptLogView:
        return await service.turn_off(session, slug)

    @get(
        "/entries", operation_id="listLoggedRequests", summary="List logged requests without their texts, newest first"
    )
    async def entries(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[EntryView]:
        return await service.list_entries(session, slug, after=after, limit=limit)

    @post(
        "/entries/{entry_id:int}/read",
        operation_id="readLoggedRequest",
        summary="Read one with its texts; who read it is kept",
        status_code=200,
    )
    async def read(
        self,
        session: NamedDependency[AsyncSession],
        current_user: NamedDependency[Principal],
        slug: FromPath[str],
        entry_id: FromPath[int],
    ) -> EntryText:
        return await service.read_entry(session, slug, entry_id, reader=current_user.name)

    @get("/reads", operation_id="listLoggedRequestReads", summary="List who read a tenant's requests, newest first")
    async def reads(
        self,
        session: NamedDependency[AsyncSession],
        slug: FromPath[str],
        after: FromQuery[str | None] = None,
        limit: Limit = 50,
    ) -> Page[ReadView]:
        return await service.list_reads(session, slug, after=after, limit=limit)


router = Router("/api/v1", route_handlers=[PromptLogController], request_max_body_size=BODY_LIMIT)
