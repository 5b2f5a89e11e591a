"""A tenant's people and service accounts: list, create, change. Layer: service. The tenants domain decides."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, URLEncodedBody
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.console import confirmations
from controlplane.console.controllers.tenants import BODY_LIMIT, ROWS, made_of
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, Form, wants_fragment
from controlplane.errors import InvalidRequestError
from controlplane.fleet.service import served_models
from controlplane.tenants import principals, service
from controlplane.tenants.schemas import PrincipalKind, PrincipalPatch, PrincipalRole, PrincipalView

ROLES = [(role.value, role.value) for role in PrincipalRole]


class PrincipalForm(msgspec.Struct, frozen=True):
    name: str = ""
    email: str = ""
    role: str = PrincipalRole.MEMBER.value
    idempotency_key: str | None = None


class RoleForm(msgspec.Struct, frozen=True):
    role: str = ""


@get("/tenants/{slug:str}/principals", include_in_schema=False)
async def principal_page(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    template = "tenants/_principals.html" if wants_fragment(request) else "tenants/principals.html"
    context = await _context(session, slug, after=after)
    return console.answer(request, template, user=current_user, section="tenants", **context)


@post("/tenants/{slug:str}/principals", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def create_principal(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    data: URLEncodedBody[PrincipalForm],
) -> Response[str] | Redirect:
    made = await made_of(_create(session, slug, data), {"name": data.name, "email": data.email, "role": data.role})
    if not isinstance(made, Form):
        return go(request, f"/tenants/{slug}/principals", confirmations.principal_created(made))
    template = "tenants/_new_principal.html" if wants_fragment(request) else "tenants/principals.html"
    context = await _context(session, slug, form=made)
    return console.answer(request, template, user=current_user, section="tenants", status=422, **context)


@post("/tenants/{slug:str}/principals/{principal_id:uuid}/role", include_in_schema=False, status_code=303)
async def change_role(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    slug: FromPath[str],
    principal_id: FromPath[UUID],
    data: URLEncodedBody[RoleForm],
) -> Response[str] | Redirect:
    changed = await principals.change_principal(session, slug, principal_id, PrincipalPatch(role=_role(data.role)))
    return go(request, f"/tenants/{changed.tenant}/principals", confirmations.principal_role(changed))


@post("/tenants/{slug:str}/principals/{principal_id:uuid}/activate", include_in_schema=False, status_code=303)
async def activate_principal(
    request: AnyRequest, session: NamedDependency[AsyncSession], slug: FromPath[str], principal_id: FromPath[UUID]
) -> Response[str] | Redirect:
    return await _set_active(request, session, slug, principal_id, True)


@post("/tenants/{slug:str}/principals/{principal_id:uuid}/deactivate", include_in_schema=False, status_code=303)
async def deactivate_principal(
    request: AnyRequest, session: NamedDependency[AsyncSession], slug: FromPath[str], principal_id: FromPath[UUID]
) -> Response[str] | Redirect:
    return await _set_active(request, session, slug, principal_id, False)


async def _create(session: AsyncSession, slug: str, data: PrincipalForm) -> PrincipalView:
    email = data.email.strip() or None
    return await principals.create_principal(
        session,
        slug,
        kind=PrincipalKind.PERSON if email else PrincipalKind.SERVICE_ACCOUNT,
        name=data.name.strip(),
        email=email,
        role=_role(data.role),
        idempotency_key=data.idempotency_key,
    )


async def _set_active(
    request: AnyRequest, session: AsyncSession, slug: str, principal_id: UUID, active: bool
) -> Response[str] | Redirect:
    changed = await principals.change_principal(session, slug, principal_id, PrincipalPatch(active=active))
    return go(request, f"/tenants/{changed.tenant}/principals", confirmations.principal_state(changed))


def _role(text: str) -> PrincipalRole:
    try:
        return PrincipalRole(text)
    except ValueError:
        raise InvalidRequestError(f"there is no role {text[:40]!r}", param="role") from None


async def _context(
    session: AsyncSession, slug: str, *, after: str | None = None, form: Form | None = None
) -> dict[str, Any]:
    return {
        "tenant": await service.get_tenant(session, slug),
        "tab": "principals",
        "served": await served_models(session),
        "page": await principals.list_principals(session, slug, after=after, limit=ROWS),
        "after": after,
        "form": form or Form(),
        "roles": ROLES,
    }
