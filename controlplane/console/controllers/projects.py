"""A tenant's projects: list, create, make inactive and active. Layer: service. The tenants domain decides."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, URLEncodedBody
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.console import confirmations
from controlplane.console.controllers.tenants import BODY_LIMIT, ROWS, made_of, model_names
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, Form, wants_fragment
from controlplane.fleet.service import served_models
from controlplane.tenants import projects, service
from controlplane.tenants.schemas import DEFAULT_PROJECT, ProjectPatch


class ProjectForm(msgspec.Struct, frozen=True):
    slug: str = ""
    name: str = ""
    allowed_models: str = ""
    idempotency_key: str | None = None


@get("/tenants/{slug:str}/projects", include_in_schema=False)
async def project_page(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    template = "tenants/_projects.html" if wants_fragment(request) else "tenants/projects.html"
    context = await _context(session, slug, after=after)
    return console.answer(request, template, user=current_user, section="tenants", **context)


@post("/tenants/{slug:str}/projects", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def create_project(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    data: URLEncodedBody[ProjectForm],
) -> Response[str] | Redirect:
    made = await made_of(
        projects.create_project(
            session,
            slug,
            slug=data.slug.strip(),
            name=data.name.strip(),
            allowed_models=model_names(data.allowed_models),
            idempotency_key=data.idempotency_key,
        ),
        {"slug": data.slug, "name": data.name, "allowed_models": data.allowed_models},
    )
    if not isinstance(made, Form):
        return go(request, f"/tenants/{slug}/projects", confirmations.project_created(made))
    template = "tenants/_new_project.html" if wants_fragment(request) else "tenants/projects.html"
    context = await _context(session, slug, form=made)
    return console.answer(request, template, user=current_user, section="tenants", status=422, **context)


@post("/tenants/{slug:str}/projects/{project:str}/activate", include_in_schema=False, status_code=303)
async def activate_project(
    request: AnyRequest, session: NamedDependency[AsyncSession], slug: FromPath[str], project: FromPath[str]
) -> Response[str] | Redirect:
    return await _set_active(request, session, slug, project, True)


@post("/tenants/{slug:str}/projects/{project:str}/deactivate", include_in_schema=False, status_code=303)
async def deactivate_project(
    request: AnyRequest, session: NamedDependency[AsyncSession], slug: FromPath[str], project: FromPath[str]
) -> Response[str] | Redirect:
    return await _set_active(request, session, slug, project, False)


async def _set_active(
    request: AnyRequest, session: AsyncSession, slug: str, project: str, active: bool
) -> Response[str] | Redirect:
    changed = await projects.change_project(session, slug, project, ProjectPatch(active=active))
    return go(request, f"/tenants/{changed.tenant}/projects", confirmations.project_state(changed))


async def _context(
    session: AsyncSession, slug: str, *, after: str | None = None, form: Form | None = None
) -> dict[str, Any]:
    return {
        "tenant": await service.get_tenant(session, slug),
        "tab": "projects",
        "served": await served_models(session),
        "page": await projects.list_projects(session, slug, after=after, limit=ROWS),
        "after": after,
        "form": form or Form(),
        "default_project": DEFAULT_PROJECT,
    }
