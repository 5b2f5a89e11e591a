"""A tenant's page: its facts and its keys, which are made, rotated and revoked here. Layer: service. The tenants
service decides.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, URLEncodedBody
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.component import Resources
from controlplane.console.confirmations import key_revoked
from controlplane.console.controllers.tenants import BODY_LIMIT, ROWS, made_of, model_names
from controlplane.console.flash import go
from controlplane.console.keys import GRACES, SCOPE_HELP, CreatedKeyText, created_key, key_row
from controlplane.console.pages import AnyRequest, Console, Form, wants_fragment
from controlplane.errors import InvalidRequestError, NotFoundError
from controlplane.fleet.service import list_pools, served_models
from controlplane.paging import LARGEST
from controlplane.tenants import principals, projects, service
from controlplane.tenants.schemas import DEFAULT_PROJECT, DEFAULT_SCOPES, CreatedKey, KeyView, Scope, TenantView

MORE = f" The first {LARGEST} are offered; the command line takes any."


class KeyForm(msgspec.Struct, frozen=True):
    """A new key as it was typed; ticked boxes come as one text or several."""

    name: str = ""
    project: str = DEFAULT_PROJECT
    principal_id: str = ""
    scopes: str | list[str] = ""
    expires_at: str = ""
    allowed_models: str = ""
    idempotency_key: str | None = None

    @property
    def ticked(self) -> list[str]:
        return [self.scopes] if isinstance(self.scopes, str) and self.scopes else list(self.scopes)

    def typed(self) -> dict[str, str]:
        fields = ("name", "project", "principal_id", "expires_at", "allowed_models")
        return {name: getattr(self, name) for name in fields} | {"scopes": " ".join(self.ticked)}


class RotationForm(msgspec.Struct, frozen=True):
    grace_s: str = ""
    idempotency_key: str | None = None


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
    made = await made_of(_create(session, slug, data), data.typed())
    if isinstance(made, Form):
        context = await _detail(session, slug, form=made)
        return _new_key(request, console, current_user, status=422, context=context)
    shown = await _shown_once(session, made, resources.settings.public_gateway_url)
    context = await _detail(session, slug, created=shown)
    return _new_key(request, console, current_user, status=200, context=context)


@post("/tenants/{slug:str}/keys/{key_id:str}/rotate", include_in_schema=False, status_code=200)
async def rotate_key(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    resources: NamedDependency[Resources],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    key_id: FromPath[str],
    data: URLEncodedBody[RotationForm],
) -> Response[str]:
    await _key_of(session, slug, key_id)
    made = await service.rotate_key(session, key_id, grace_s=_grace(data.grace_s), idempotency_key=data.idempotency_key)
    old = await service.get_key(session, key_id)
    shown = await _shown_once(session, made, resources.settings.public_gateway_url, old)
    context = await _detail(session, slug, created=shown)
    return _new_key(request, console, current_user, status=200, context=context)


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
    await _key_of(session, slug, key_id)
    revoked = key_revoked(await service.revoke_key(session, key_id))
    if not wants_fragment(request):
        return go(request, f"/tenants/{slug}", revoked)
    context = await _detail(session, slug)
    templates = ("tenants/_keys.html", "components/_flash.html")
    return console.answer(request, *templates, user=current_user, flash=revoked, **context)


def _new_key(
    request: AnyRequest, console: Console, user: Principal, *, status: int, context: dict[str, Any]
) -> Response[str]:
    """The form for new keys, above it what was just made, and the keys beside it."""
    fragment = wants_fragment(request)
    templates = ("tenants/_new_key.html", "tenants/_keys.html") if fragment else ("tenants/detail.html",)
    return console.answer(
        request, *templates, user=user, section="tenants", status=status, **{**context, "oob": fragment}
    )


async def _create(session: AsyncSession, slug: str, data: KeyForm) -> CreatedKey:
    return await service.create_key(
        session,
        tenant_slug=slug,
        name=data.name.strip(),
        project=data.project,
        principal_id=_owner(data.principal_id),
        scopes=[_scope(text) for text in data.ticked] or None,
        allowed_models=model_names(data.allowed_models),
        expires_at=_day(data.expires_at.strip()),
        idempotency_key=data.idempotency_key,
    )


async def _key_of(session: AsyncSession, slug: str, key_id: str) -> KeyView:
    key = await service.get_key(session, key_id)
    if key.tenant != slug:
        raise NotFoundError(f"tenant {slug[:40]} has no key {key_id[:11]}", code="key_not_found")
    return key


async def _detail(
    session: AsyncSession,
    slug: str,
    *,
    after: str | None = None,
    form: Form | None = None,
    created: CreatedKeyText | None = None,
) -> dict[str, Any]:
    """What the tenant's page shows, with what a new key may be made for."""
    tenant = await service.get_tenant(session, slug)
    keys = await service.list_keys(session, slug, after=after, limit=ROWS)
    homes = await projects.list_projects(session, slug, limit=LARGEST)
    owners = await principals.list_principals(session, slug, limit=LARGEST)
    return {
        "tenant": tenant,
        "tab": "keys",
        "keys": [key_row(key) for key in keys.items],
        "served": await served_models(session),
        "next": keys.next,
        "after": after,
        "form": form or Form(),
        "created": created,
        "oob": False,
        "projects": [(each.slug, each.name) for each in homes.items if each.active],
        "owners": [("", "nobody")]
        + [(str(each.id), f"{each.name} ({each.role.value})") for each in owners.items if each.active],
        "more_projects": MORE if homes.next else "",
        "more_owners": MORE if owners.next else "",
        "scopes": [(scope.value, SCOPE_HELP[scope]) for scope in Scope],
        "default_scopes": [scope.value for scope in DEFAULT_SCOPES],
        "graces": GRACES,
    }


async def _shown_once(
    session: AsyncSession, created: CreatedKey, gateway: str, replaced: KeyView | None = None
) -> CreatedKeyText:
    tenant = await service.get_tenant(session, created.view.tenant)
    return created_key(created, gateway, await _example_model(session, tenant, created.view), replaced)


async def _example_model(session: AsyncSession, tenant: TenantView, key: KeyView) -> str:
    """A model the key may use: one it names, else one its project or tenant names, else one that is served."""
    project = await projects.get_project(session, tenant.slug, key.project)
    for allowed in (key.allowed_models, project.allowed_models, tenant.allowed_models):
        if allowed:
            return allowed[0]
    pools = await list_pools(session)
    return pools[0].model if pools else "a-served-model"


def _owner(text: str) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        raise InvalidRequestError("the owner is not one of the list", param="principal_id") from None


def _scope(text: str) -> Scope:
    try:
        return Scope(text)
    except ValueError:
        raise InvalidRequestError(f"there is no scope {text[:40]!r}", param="scopes") from None


def _day(text: str) -> datetime | None:
    """When the day written as YYYY-MM-DD begins in UTC; None when nothing is written."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) if text else None
    except ValueError:
        raise InvalidRequestError("the day must be written as YYYY-MM-DD", param="expires_at") from None


def _grace(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InvalidRequestError("grace_s must be a number of seconds", param="grace_s")
    return int(text)
