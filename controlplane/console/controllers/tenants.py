"""The Tenants pages: list, create, facts. Layer: service. The tenants service decides."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, URLEncodedBody
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.console.confirmations import tenant_created, tenant_state
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, Form, wants_fragment
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.tenants import service

ROWS = 50
BODY_LIMIT = 64 * 1024
Made = TypeVar("Made")


class TenantForm(msgspec.Struct, frozen=True):
    slug: str = ""
    name: str = ""
    allowed_models: str = ""
    idempotency_key: str | None = None


@get("/tenants", include_in_schema=False)
async def tenants(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    return console.answer(
        request,
        "tenants/_table.html" if wants_fragment(request) else "tenants/list.html",
        user=current_user,
        section="tenants",
        page=await service.list_tenants(session, after=after, limit=ROWS),
        after=after,
        form=Form(),
    )


@post("/tenants", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def create_tenant(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    data: URLEncodedBody[TenantForm],
) -> Response[str] | Redirect:
    made = await made_of(
        service.create_tenant(
            session,
            slug=data.slug.strip(),
            name=data.name.strip(),
            allowed_models=model_names(data.allowed_models),
            idempotency_key=data.idempotency_key,
        ),
        {"slug": data.slug, "name": data.name, "allowed_models": data.allowed_models},
    )
    if not isinstance(made, Form):
        return go(request, f"/tenants/{made.slug}", tenant_created(made))
    if wants_fragment(request):
        return console.answer(request, "tenants/_create.html", user=current_user, status=422, form=made)
    page = await service.list_tenants(session, limit=ROWS)
    return console.answer(
        request,
        "tenants/list.html",
        user=current_user,
        section="tenants",
        status=422,
        page=page,
        after=None,
        form=made,
    )


@post("/tenants/{slug:str}/activate", include_in_schema=False, status_code=303)
async def activate(
    request: AnyRequest, session: NamedDependency[AsyncSession], slug: FromPath[str]
) -> Response[str] | Redirect:
    tenant = await service.set_tenant_active(session, slug, True)
    return go(request, f"/tenants/{tenant.slug}", tenant_state(tenant))


@post("/tenants/{slug:str}/deactivate", include_in_schema=False, status_code=303)
async def deactivate(
    request: AnyRequest, session: NamedDependency[AsyncSession], slug: FromPath[str]
) -> Response[str] | Redirect:
    tenant = await service.set_tenant_active(session, slug, False)
    return go(request, f"/tenants/{tenant.slug}", tenant_state(tenant))


async def made_of(creating: Awaitable[Made], typed: Mapping[str, str]) -> Made | Form:
    """What `creating` makes, or the form again as it was typed, with the reason at its field."""
    try:
        return await creating
    except (InvalidRequestError, ConflictError) as error:
        return Form.refused(typed, error)
    except NotFoundError as error:
        if error.param not in typed:
            raise
        return Form.refused(typed, error)


def model_names(text: str) -> list[str] | None:
    """Model names separated by commas or white space; none means every model."""
    return re.split(r"[\s,]+", text.strip(" ,\t\r\n")) if text.strip(" ,\t\r\n") else None
