"""The Quotas pages: tenants with their limits, one limit with its raises, requests for more. Layer: service.

The quotas services decide. A refused form is shown again, whole page or the main part of it.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, URLEncodedBody
from litestar.response import Redirect
from msgspec.structs import asdict
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.canaries import service as canaries
from controlplane.canaries.schemas import CanaryView
from controlplane.component import Resources
from controlplane.console import confirmations, forms
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, Form
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.quotas import request_service, service
from controlplane.quotas.schemas import Away, QuotaKind, QuotaLevel
from controlplane.quotas.views import GrantSpec, QuotaPatch, QuotaSpec, RequestState
from controlplane.tenants.service import list_tenants

ROWS = 50
BODY_LIMIT = 64 * 1024
REFUSED = (InvalidRequestError, ConflictError, NotFoundError)
KINDS = [(kind.value, kind.value.replace("_", " ").capitalize()) for kind in QuotaKind]
AWAYS = [
    (Away.CLOSED.value, "Refuse requests"),
    (Away.LOCAL.value, "Let each gateway count alone"),
    (Away.OPEN.value, "Let requests pass"),
]


class QuotaForm(msgspec.Struct, frozen=True):
    kind: str = ""
    soft: str = ""
    hard: str = ""
    away: str = Away.CLOSED
    local: str = ""
    project: str = ""
    key: str = ""
    model: str = ""
    idempotency_key: str | None = None


class GrantForm(msgspec.Struct, frozen=True):
    amount: str = ""
    expires_at: str = ""
    reason: str = ""
    idempotency_key: str | None = None


@get("/quotas", include_in_schema=False)
async def quotas(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    page = await list_tenants(session, after=after, limit=ROWS)
    waiting = await request_service.list_requests(session, state=RequestState.OPEN, limit=ROWS)
    return console.answer(
        request,
        "quotas/overview.html",
        user=current_user,
        section="quotas",
        page=page,
        counts=await service.count_by_tenant(session, [tenant.id for tenant in page.items]),
        waiting=waiting,
        after=after,
        kinds=dict(KINDS),
    )


@post("/quota-requests/{request_id:uuid}/approve", include_in_schema=False, status_code=303)
async def approve(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    request_id: FromPath[UUID],
) -> Response[str] | Redirect:
    decided = await request_service.approve(session, request_id, by=current_user.name)
    return go(request, "/quotas", confirmations.request_decided(decided))


@post("/quota-requests/{request_id:uuid}/decline", include_in_schema=False, status_code=303)
async def decline(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    request_id: FromPath[UUID],
) -> Response[str] | Redirect:
    decided = await request_service.decline(session, request_id, by=current_user.name)
    return go(request, "/quotas", confirmations.request_decided(decided))


@get("/tenants/{slug:str}/quotas", include_in_schema=False)
async def tenant_quotas(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    resources: NamedDependency[Resources],
    slug: FromPath[str],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    context = await _tenant_context(session, resources, slug, after=after)
    return console.answer(request, "quotas/tenant.html", user=current_user, section="quotas", **context)


@post("/tenants/{slug:str}/quotas", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def create_quota(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    resources: NamedDependency[Resources],
    slug: FromPath[str],
    data: URLEncodedBody[QuotaForm],
) -> Response[str] | Redirect:
    try:
        quota = await service.create_quota(session, slug, _spec(data), idempotency_key=data.idempotency_key)
    except REFUSED as error:
        context = await _tenant_context(session, resources, slug, form=_refused(data, error))
        return console.answer(request, "quotas/tenant.html", user=current_user, section="quotas", status=422, **context)
    return go(request, f"/tenants/{slug}/quotas", confirmations.quota_set(quota))


@get("/quotas/{quota_id:uuid}", include_in_schema=False)
async def quota_page(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    resources: NamedDependency[Resources],
    quota_id: FromPath[UUID],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    context = await _quota_context(session, resources, quota_id, after=after)
    return console.answer(request, "quotas/detail.html", user=current_user, section="quotas", **context)


@post("/quotas/{quota_id:uuid}", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def change_quota(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    resources: NamedDependency[Resources],
    quota_id: FromPath[UUID],
    data: URLEncodedBody[QuotaForm],
) -> Response[str] | Redirect:
    try:
        quota = await service.change_quota(session, quota_id, _patch(data))
    except REFUSED as error:
        context = await _quota_context(session, resources, quota_id, form=_refused(data, error))
        return console.answer(request, "quotas/detail.html", user=current_user, section="quotas", status=422, **context)
    return go(request, f"/quotas/{quota_id}", confirmations.quota_changed(quota))


@post("/quotas/{quota_id:uuid}/delete", include_in_schema=False, status_code=303)
async def delete_quota(
    request: AnyRequest, session: NamedDependency[AsyncSession], quota_id: FromPath[UUID]
) -> Response[str] | Redirect:
    gone = await service.delete_quota(session, quota_id)
    return go(request, f"/tenants/{gone.tenant}/quotas", confirmations.quota_removed(gone))


@post("/quotas/{quota_id:uuid}/grants", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def create_grant(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    resources: NamedDependency[Resources],
    quota_id: FromPath[UUID],
    data: URLEncodedBody[GrantForm],
) -> Response[str] | Redirect:
    try:
        spec = _grant(data)
        given = await service.grant(session, quota_id, spec, by=current_user.name, idempotency_key=data.idempotency_key)
    except REFUSED as error:
        context = await _quota_context(session, resources, quota_id, grant_form=_refused(data, error))
        return console.answer(request, "quotas/detail.html", user=current_user, section="quotas", status=422, **context)
    quota = await service.get_quota(session, quota_id)
    return go(request, f"/quotas/{quota_id}", confirmations.raised(quota, given))


@post("/quotas/{quota_id:uuid}/grants/{grant_id:uuid}/end", include_in_schema=False, status_code=303)
async def end_grant(
    request: AnyRequest, session: NamedDependency[AsyncSession], quota_id: FromPath[UUID], grant_id: FromPath[UUID]
) -> Response[str] | Redirect:
    ended = await service.end_grant(session, quota_id, grant_id)
    quota = await service.get_quota(session, quota_id)
    return go(request, f"/quotas/{quota_id}", confirmations.raise_ended(quota, ended))


PAGES = [
    quotas,
    approve,
    decline,
    tenant_quotas,
    create_quota,
    quota_page,
    change_quota,
    delete_quota,
    create_grant,
    end_grant,
]


async def _tenant_context(
    session: AsyncSession, resources: Resources, slug: str, *, after: str | None = None, form: Form | None = None
) -> dict[str, Any]:
    return {
        "slug": slug,
        "page": await service.list_quotas(session, slug, after=after, limit=ROWS),
        "canaries": await _last_proven(session, resources),
        "after": after,
        "form": form or Form(),
        "kinds": KINDS,
        "aways": AWAYS,
    }


async def _quota_context(
    session: AsyncSession,
    resources: Resources,
    quota_id: UUID,
    *,
    after: str | None = None,
    form: Form | None = None,
    grant_form: Form | None = None,
) -> dict[str, Any]:
    quota = await service.get_quota(session, quota_id)
    stored = {name: _text(amount) for name, amount in (("soft", quota.soft), ("hard", quota.hard))}
    return {
        "quota": quota,
        "grants": await service.list_grants(session, quota_id, after=after, limit=ROWS),
        "canary": (await _last_proven(session, resources)).get((quota.level, quota.kind)),
        "after": after,
        "form": form or Form({**stored, "away": quota.away, "local": _text(quota.local or None)}),
        "now": time.time(),
        "grant_form": grant_form or Form(),
        "kinds": dict(KINDS),
        "aways": AWAYS,
    }


async def _last_proven(session: AsyncSession, resources: Resources) -> dict[tuple[QuotaLevel, QuotaKind], CanaryView]:
    """By level and kind, the canary that is worst off over all endpoints and gateways. One query."""
    return canaries.worst(await canaries.all_canaries(session, every_s=resources.settings.canary_every_s))


def _spec(data: QuotaForm) -> QuotaSpec:
    if data.kind not in dict(KINDS):
        raise InvalidRequestError("choose what to limit", param="kind")
    return QuotaSpec(
        kind=QuotaKind(data.kind),
        soft=forms.whole("soft", data.soft),
        hard=forms.whole("hard", data.hard),
        away=_away(data.away),
        local=forms.whole("local", data.local) or 0,
        project=forms.word(data.project),
        key=forms.word(data.key),
        model=forms.word(data.model),
    )


def _patch(data: QuotaForm) -> QuotaPatch:
    return QuotaPatch(
        soft=forms.whole("soft", data.soft),
        hard=forms.whole("hard", data.hard),
        away=_away(data.away),
        local=forms.whole("local", data.local) or 0,
    )


def _grant(data: GrantForm) -> GrantSpec:
    expires_at = forms.instant("expires_at", data.expires_at)
    if expires_at is None:
        raise InvalidRequestError("a raise needs an end", param="expires_at")
    return GrantSpec(amount=forms.required("amount", data.amount), expires_at=expires_at, reason=data.reason)


def _away(text: str) -> Away:
    if text not in dict(AWAYS):
        raise InvalidRequestError("choose what happens while Redis is away", param="away")
    return Away(text)


def _text(amount: int | None) -> str:
    return "" if amount is None else str(amount)


def _refused(data: QuotaForm | GrantForm, error: InvalidRequestError | ConflictError | NotFoundError) -> Form:
    """The form as it was filled in, with the service's sentence. A tenant or limit that is not there raises again."""
    if isinstance(error, NotFoundError) and error.param in ("slug", "quota_id"):
        raise error
    values = {name: str(value) for name, value in asdict(data).items() if name != "idempotency_key"}
    if error.param == "key_id":
        return Form(values=values, errors={"key": f"{error.message[:1].upper()}{error.message[1:]}."})
    return Form.refused(values, error)
