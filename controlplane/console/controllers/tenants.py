"""The Tenants pages: list, create, facts, keys. Layer: service. The tenants service decides."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, URLEncodedBody
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.component import Resources
from controlplane.console.keys import created_key, key_row
from controlplane.console.pages import AnyRequest, Console, Form, wants_fragment
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.fleet.service import list_pools, served_models
from controlplane.tenants import service
from controlplane.tenants.schemas import CreatedKey, TenantView

ROWS = 50
BODY_LIMIT = 64 * 1024
Made = TypeVar("Made")


class KeyForm(msgspec.Struct, frozen=True):
    name: str = ""
    allowed_models: str = ""
    idempotency_key: str | None = None


class TenantForm(KeyForm, frozen=True):
    slug: str = ""


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
    slug = data.slug.strip()
    made = await _made(partial(service.create_tenant, session, slug=slug), data, slug=slug)
    if not isinstance(made, Form):
        return _go(request, f"/tenants/{made.slug}")
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


@get("/tenants/{slug:str}", include_in_schema=False)
async def tenant_page(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    templates = ("tenants/_keys.html",) if wants_fragment(request) else ("tenants/detail.html",)
    context = await _detail(session, slug, after=after)
    return console.answer(request, *templates, user=current_user, section="tenants", **context)


@post("/tenants/{slug:str}/activate", include_in_schema=False, status_code=303)
async def activate(session: NamedDependency[AsyncSession], slug: FromPath[str]) -> Redirect:
    tenant = await service.set_tenant_active(session, slug, True)
    return Redirect(f"/tenants/{tenant.slug}", status_code=303)


@post("/tenants/{slug:str}/deactivate", include_in_schema=False, status_code=303)
async def deactivate(session: NamedDependency[AsyncSession], slug: FromPath[str]) -> Redirect:
    tenant = await service.set_tenant_active(session, slug, False)
    return Redirect(f"/tenants/{tenant.slug}", status_code=303)


@post("/tenants/{slug:str}/keys", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def create_key(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    resources: NamedDependency[Resources],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    data: URLEncodedBody[KeyForm],
) -> Response[str]:
    made = await _made(partial(service.create_key, session, tenant_slug=slug), data)
    form, created = (made, None) if isinstance(made, Form) else (None, made)
    context = await _detail(session, slug, form=form, created=created, gateway=resources.settings.public_gateway_url)
    templates = ("tenants/_new_key.html", "tenants/_keys.html") if wants_fragment(request) else ("tenants/detail.html",)
    return console.answer(
        request,
        *templates,
        user=current_user,
        section="tenants",
        status=200 if created else 422,
        **{**context, "oob": wants_fragment(request)},
    )


@post("/tenants/{slug:str}/keys/{key_id:str}/revoke", include_in_schema=False, status_code=200)
async def revoke_key(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    key_id: FromPath[str],
) -> Response[str] | Redirect:
    key = await service.get_key(session, key_id)
    if key.tenant != slug:
        raise NotFoundError(f"tenant {slug[:40]} has no key {key_id[:11]}", code="key_not_found")
    await service.revoke_key(session, key_id)
    if not wants_fragment(request):
        return Redirect(f"/tenants/{slug}", status_code=303)
    context = await _detail(session, slug)
    return console.answer(request, "tenants/_keys.html", "tenants/_revoked.html", user=current_user, key=key, **context)


async def _made(create: Callable[..., Awaitable[Made]], data: KeyForm, **typed: str) -> Made | Form:
    """What `create` makes of the form, or the form again with the reason; `typed` are its fields beside a key's own."""
    try:
        return await create(
            name=data.name.strip(),
            allowed_models=_models(data.allowed_models),
            idempotency_key=data.idempotency_key,
        )
    except (InvalidRequestError, ConflictError) as error:
        return Form.refused({"name": data.name, "allowed_models": data.allowed_models, **typed}, error)


async def _detail(
    session: AsyncSession,
    slug: str,
    *,
    after: str | None = None,
    form: Form | None = None,
    created: CreatedKey | None = None,
    gateway: str = "",
) -> dict[str, Any]:
    """What the tenant's page shows; a key just created brings its snippet."""
    tenant = await service.get_tenant(session, slug)
    keys = await service.list_keys(session, slug, after=after, limit=ROWS)
    model = await _example_model(session, tenant, created) if created else ""
    return {
        "tenant": tenant,
        "keys": [key_row(key) for key in keys.items],
        "served": await served_models(session),
        "next": keys.next,
        "after": after,
        "form": form or Form(),
        "created": created_key(created, gateway, model) if created else None,
        "oob": False,
    }


async def _example_model(session: AsyncSession, tenant: TenantView, created: CreatedKey) -> str:
    """A model the key may use: one it names, else one its tenant names, else one that is served."""
    for allowed in (created.view.allowed_models, tenant.allowed_models):
        if allowed:
            return allowed[0]
    pools = await list_pools(session)
    return pools[0].model if pools else "a-served-model"


def _models(text: str) -> list[str] | None:
    """Model names separated by commas or white space; none means every model."""
    return re.split(r"[\s,]+", text.strip(" ,\t\r\n")) if text.strip(" ,\t\r\n") else None


def _go(request: AnyRequest, path: str) -> Response[str] | Redirect:
    """After a change: htmx is told where to go, a plain form is redirected."""
    if wants_fragment(request):
        return Response("", headers={"hx-redirect": path})
    return Redirect(path, status_code=303)
