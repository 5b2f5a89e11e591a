"""The forms that change a tenant's or a project's fields. Layer: service. The tenants domain decides.

Only fields whose text differs from what was shown are sent on, so that a name that has no exact text here, such as a
model's with a space, and what somebody else changed meanwhile are left alone by who changes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
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
from controlplane.errors import ConflictError, InvalidRequestError
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
    """What was typed. A project has neither priority, time zone, weight nor floor, "default" no state. `seen` is
    `_marks` of what the form was filled with; without it that is taken to be what is stored.
    """

    name: str = ""
    active: str = ACTIVE
    allowed_models: str = ""
    priority: str = ""
    time_zone: str = ""
    weight: str = ""
    floor_tokens_per_s: str = ""
    metadata_key: str | list[str] = ""
    metadata_value: str | list[str] = ""
    seen: str = ""

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
    context = await _tenant_context(session, slug, refused=made, data=data)
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
    context = await _project_context(session, slug, project, refused=made, data=data)
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
    session: AsyncSession, slug: str, *, refused: Form | None = None, data: ChangeForm | None = None
) -> dict[str, Any]:
    tenant = await service.get_tenant(session, slug)
    return {
        **_form_context(_tenant_values(tenant), tenant.metadata, refused, data),
        "tenant": tenant,
        "tab": "",
        "served": await served_models(session),
    }


async def _project_context(
    session: AsyncSession, slug: str, project: str, *, refused: Form | None = None, data: ChangeForm | None = None
) -> dict[str, Any]:
    stored = await projects.get_project(session, slug, project)
    return {
        **_form_context(_project_values(stored), stored.metadata, refused, data),
        "tenant": await service.get_tenant(session, slug),
        "project": stored,
        "default_project": DEFAULT_PROJECT,
    }


def _form_context(
    stored: Mapping[str, str], metadata: Mapping[str, str], refused: Form | None, data: ChangeForm | None
) -> dict[str, Any]:
    """The form as it is stored now; of one that was refused, with what was typed into it."""
    marks = _marks(stored, metadata)
    values, pairs = dict(stored), sorted(metadata.items())
    if data is not None:
        seen = {**marks, **_read_marks(data.seen)}
        values |= {name: text for name, text in data.values.items() if seen.get(name) != _mark(text)}
        pairs = data.pairs if seen["metadata"] != _mark_of_pairs(dict(data.pairs)) else pairs
    return {
        "form": Form(values, refused.errors if refused is not None else {}),
        "pairs": _with_spare(pairs),
        "seen": " ".join(f"{name}={mark}" for name, mark in marks.items()),
        "states": STATES,
    }


def _tenant_values(tenant: TenantView) -> dict[str, str]:
    return {
        "name": tenant.name,
        "active": ACTIVE if tenant.active else INACTIVE,
        "allowed_models": ", ".join(tenant.allowed_models or ()),
        "priority": str(tenant.priority),
        "time_zone": tenant.time_zone,
        "weight": _number(tenant.weight),
        "floor_tokens_per_s": _number(tenant.floor_tokens_per_s),
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
    """What was changed of what the form showed. Raises InvalidRequestError by field, and ConflictError for a field that
    has been changed otherwise since.
    """
    typed, marks = data.values, _marks(stored, metadata)
    seen = {**marks, **_read_marks(data.seen)}
    changes: dict[str, Any] = {}
    for name, text in stored.items():
        if _mark(typed[name]) in (seen[name], marks[name]):
            continue
        if seen[name] != marks[name]:
            raise _changed_since(name, f"to {text[:100]!r} ")
        changes[name] = _READ[name](typed[name])
    pairs = _metadata(data.pairs)
    if _mark_of_pairs(pairs) not in (seen["metadata"], marks["metadata"]):
        if seen["metadata"] != marks["metadata"]:
            raise _changed_since("metadata")
        changes["metadata"] = pairs
    return changes


def _changed_since(name: str, into: str = "") -> ConflictError:
    message = f"{name} was changed {into}by somebody else meanwhile; save again to replace that"
    return ConflictError(message, code="changed_meanwhile", param=name)


def _marks(stored: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """By which a field is known to be as it was shown."""
    return {**{name: _mark(text) for name, text in stored.items()}, "metadata": _mark_of_pairs(metadata)}


def _read_marks(seen: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in seen.split() if "=" in part)


def _mark(text: str) -> str:
    return blake2b(text.strip().encode(), digest_size=8).hexdigest()


def _mark_of_pairs(metadata: Mapping[str, str]) -> str:
    return _mark(msgspec.json.encode(sorted(metadata.items())).decode())


def _metadata(pairs: Pairs) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in pairs:
        if not key.strip():
            raise InvalidRequestError(f"metadata: the value {value[:40]!r} has no key", param="metadata")
        if key in found:
            raise InvalidRequestError(f"metadata: the key {key[:40]!r} is there twice", param="metadata")
        found[key] = value
    return found


def _number(value: float) -> str:
    """All its digits."""
    return repr(value).removesuffix(".0")


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
