"""The forms that change a tenant's or a project's fields. Layer: service. The tenants domain decides.

Only fields whose text differs from what is stored are sent on, so that a name that has no exact text here, such as a
model's with a space, is left alone by who changes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, URLEncodedBody
from litestar.response import Redirect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.console import forms
from controlplane.console.controllers.tenants import BODY_LIMIT, go, made_of, model_names
from controlplane.console.pages import AnyRequest, Console, Form
from controlplane.errors import InvalidRequestError
from controlplane.fleet.service import served_models
from controlplane.tenants import projects, service
from controlplane.tenants.schemas import (
    DEFAULT_PROJECT,
    MOST_PAIRS,
    ProjectPatch,
    ProjectView,
    TenantPatch,
    TenantView,
)

ACTIVE, INACTIVE = "active", "inactive"
STATES = [(ACTIVE, "Active"), (INACTIVE, "Inactive: all its keys are refused")]
SPARE_PAIRS = 2
"""Empty pairs of metadata to fill in, beside those there are."""
Pairs = list[tuple[str, str]]


class ChangeForm(msgspec.Struct, frozen=True):
    """What was typed. A project has neither priority, time zone, weight nor floor, "default" no state."""

    name: str = ""
    active: str = ACTIVE
    allowed_models: str = ""
    priority: str = ""
    time_zone: str = ""
    weight: str = ""
    floor_tokens_per_s: str = ""
    metadata_key: str | list[str] = ""
    metadata_value: str | list[str] = ""

    @property
    def values(self) -> dict[str, str]:
        """The single fields, and "metadata", at which what is wrong with the pairs is told."""
        names = (name for name in self.__struct_fields__ if not name.startswith("metadata_"))
        return {name: getattr(self, name) for name in names} | {"metadata": ""}

    @property
    def pairs(self) -> Pairs:
        """The pairs as typed, without those that are empty. A value that lost its key stays, to be told of."""
        keys, values = (
            [one] if isinstance(one, str) else list(one) for one in (self.metadata_key, self.metadata_value)
        )
        values += [""] * (len(keys) - len(values))
        return [(key, value) for key, value in zip(keys, values, strict=False) if key.strip() or value.strip()]


@get("/tenants/{slug:str}/change", include_in_schema=False)
async def tenant_form(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
) -> Response[str]:
    context = await _tenant_context(session, slug)
    return console.answer(request, "tenants/change.html", user=current_user, section="tenants", **context)


@post("/tenants/{slug:str}/change", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def change_tenant(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    data: URLEncodedBody[ChangeForm],
) -> Response[str] | Redirect:
    made = await made_of(_change_tenant(session, slug, data), data.values)
    if not isinstance(made, Form):
        return go(request, f"/tenants/{slug}")
    context = await _tenant_context(session, slug, form=made, pairs=data.pairs)
    return console.answer(request, "tenants/change.html", user=current_user, section="tenants", status=422, **context)


@get("/tenants/{slug:str}/projects/{project:str}/change", include_in_schema=False)
async def project_form(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    project: FromPath[str],
) -> Response[str]:
    context = await _project_context(session, slug, project)
    return console.answer(request, "tenants/project_change.html", user=current_user, section="tenants", **context)


@post(
    "/tenants/{slug:str}/projects/{project:str}/change",
    include_in_schema=False,
    status_code=200,
    request_max_body_size=BODY_LIMIT,
)
async def change_project(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    slug: FromPath[str],
    project: FromPath[str],
    data: URLEncodedBody[ChangeForm],
) -> Response[str] | Redirect:
    made = await made_of(_change_project(session, slug, project, data), data.values)
    if not isinstance(made, Form):
        return go(request, f"/tenants/{slug}/projects")
    context = await _project_context(session, slug, project, form=made, pairs=data.pairs)
    template = "tenants/project_change.html"
    return console.answer(request, template, user=current_user, section="tenants", status=422, **context)


PAGES: list[Any] = [tenant_form, change_tenant, project_form, change_project]


async def _change_tenant(session: AsyncSession, slug: str, data: ChangeForm) -> TenantView:
    stored = await service.get_tenant(session, slug)
    changes = _changes(data, _tenant_values(stored), stored.metadata)
    return await service.change_tenant(session, slug, TenantPatch(**changes))


async def _change_project(session: AsyncSession, slug: str, project: str, data: ChangeForm) -> ProjectView:
    stored = await projects.get_project(session, slug, project)
    changes = _changes(data, _project_values(stored), stored.metadata)
    return await projects.change_project(session, slug, project, ProjectPatch(**changes))


async def _tenant_context(
    session: AsyncSession, slug: str, *, form: Form | None = None, pairs: Pairs | None = None
) -> dict[str, Any]:
    tenant = await service.get_tenant(session, slug)
    return {
        "tenant": tenant,
        "form": form or Form(_tenant_values(tenant)),
        "pairs": _with_spare(sorted(tenant.metadata.items()) if pairs is None else pairs),
        "states": STATES,
        "tab": "",
        "served": await served_models(session),
    }


async def _project_context(
    session: AsyncSession, slug: str, project: str, *, form: Form | None = None, pairs: Pairs | None = None
) -> dict[str, Any]:
    stored = await projects.get_project(session, slug, project)
    return {
        "tenant": await service.get_tenant(session, slug),
        "project": stored,
        "form": form or Form(_project_values(stored)),
        "pairs": _with_spare(sorted(stored.metadata.items()) if pairs is None else pairs),
        "states": STATES,
        "default_project": DEFAULT_PROJECT,
    }


def _tenant_values(tenant: TenantView) -> dict[str, str]:
    return {
        "name": tenant.name,
        "active": ACTIVE if tenant.active else INACTIVE,
        "allowed_models": ", ".join(tenant.allowed_models or ()),
        "priority": str(tenant.priority),
        "time_zone": tenant.time_zone,
        "weight": f"{tenant.weight:g}",
        "floor_tokens_per_s": f"{tenant.floor_tokens_per_s:g}",
    }


def _project_values(project: ProjectView) -> dict[str, str]:
    return {
        "name": project.name,
        "active": ACTIVE if project.active else INACTIVE,
        "allowed_models": ", ".join(project.allowed_models or ()),
    }


def _with_spare(pairs: Pairs) -> Pairs:
    return pairs + [("", "")] * min(SPARE_PAIRS, max(0, MOST_PAIRS - len(pairs)))


def _changes(data: ChangeForm, stored: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, Any]:
    """What differs from what is stored. Raises InvalidRequestError by field."""
    typed = data.values
    changes = {name: _READ[name](typed[name]) for name in stored if typed[name].strip() != stored[name].strip()}
    pairs = _metadata(data.pairs)
    return changes if pairs == metadata else {**changes, "metadata": pairs}


def _metadata(pairs: Pairs) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in pairs:
        if not key.strip():
            raise InvalidRequestError(f"metadata: the value {value[:40]!r} has no key", param="metadata")
        if key in found:
            raise InvalidRequestError(f"metadata: the key {key[:40]!r} is there twice", param="metadata")
        found[key] = value
    return found


def _active(text: str) -> bool:
    if text not in (ACTIVE, INACTIVE):
        raise InvalidRequestError("choose active or inactive", param="active")
    return text == ACTIVE


_READ: dict[str, Callable[[str], Any]] = {
    "name": str.strip,
    "active": _active,
    "allowed_models": model_names,
    "priority": lambda text: forms.signed("priority", text),
    "time_zone": str.strip,
    "weight": lambda text: forms.required_decimal("weight", text),
    "floor_tokens_per_s": lambda text: forms.decimal("floor_tokens_per_s", text) or 0.0,
}
