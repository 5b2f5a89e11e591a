"""The Objectives page: what is promised to whom. Layer: service. The slo service decides."""

from __future__ import annotations

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
from controlplane.console import confirmations, forms
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, Form, sentence
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.slo import service
from controlplane.slo.schemas import SloPatch, SloSpec

ROWS = 50
BODY_LIMIT = 64 * 1024


class SloForm(msgspec.Struct, frozen=True):
    tenant: str = ""
    pool: str = ""
    service_class: str = ""
    ttft_ms: str = ""
    ttft_share: str = ""
    tpot_ms: str = ""
    tpot_share: str = ""
    availability: str = ""
    window_days: str = "30"
    idempotency_key: str | None = None


@get("/slos", include_in_schema=False)
async def slos(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    context = await _context(session, after=after)
    return console.answer(request, "quotas/slos.html", user=current_user, section="slos", **context)


@post("/slos", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def create_slo(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    data: URLEncodedBody[SloForm],
) -> Response[str] | Redirect:
    try:
        slo = await service.create_slo(session, _spec(data), idempotency_key=data.idempotency_key)
    except (InvalidRequestError, ConflictError, NotFoundError) as error:
        context = await _context(session, form=_refused(data, error))
        return console.answer(request, "quotas/slos.html", user=current_user, section="slos", status=422, **context)
    return go(request, "/slos", confirmations.objectives_set(slo))


@post("/slos/{slo_id:uuid}/enable", include_in_schema=False, status_code=303)
async def enable(
    request: AnyRequest, session: NamedDependency[AsyncSession], slo_id: FromPath[UUID]
) -> Response[str] | Redirect:
    slo = await service.change_slo(session, slo_id, SloPatch(enabled=True))
    return go(request, "/slos", confirmations.objectives_state(slo))


@post("/slos/{slo_id:uuid}/disable", include_in_schema=False, status_code=303)
async def disable(
    request: AnyRequest, session: NamedDependency[AsyncSession], slo_id: FromPath[UUID]
) -> Response[str] | Redirect:
    slo = await service.change_slo(session, slo_id, SloPatch(enabled=False))
    return go(request, "/slos", confirmations.objectives_state(slo))


@post("/slos/{slo_id:uuid}/delete", include_in_schema=False, status_code=303)
async def delete_slo(
    request: AnyRequest, session: NamedDependency[AsyncSession], slo_id: FromPath[UUID]
) -> Response[str] | Redirect:
    gone = await service.delete_slo(session, slo_id)
    return go(request, "/slos", confirmations.objectives_removed(gone))


PAGES = [slos, create_slo, enable, disable, delete_slo]


async def _context(session: AsyncSession, *, after: str | None = None, form: Form | None = None) -> dict[str, Any]:
    page = await service.list_slos(session, after=after, limit=ROWS)
    return {"page": page, "after": after, "form": form or Form({"window_days": "30"})}


def _spec(data: SloForm) -> SloSpec:
    return SloSpec(
        tenant=forms.word(data.tenant),
        pool=forms.word(data.pool),
        service_class=forms.word(data.service_class),
        ttft_ms=forms.whole("ttft_ms", data.ttft_ms),
        ttft_share=forms.share("ttft_share", data.ttft_share),
        tpot_ms=forms.decimal("tpot_ms", data.tpot_ms),
        tpot_share=forms.share("tpot_share", data.tpot_share),
        availability=forms.share("availability", data.availability),
        window_days=forms.required("window_days", data.window_days),
    )


def _refused(data: SloForm, error: InvalidRequestError | ConflictError | NotFoundError) -> Form:
    """The form as it was filled in, with the service's sentence at the field that has another name here."""
    values = {name: str(value) for name, value in asdict(data).items() if name != "idempotency_key"}
    field = {"class": "service_class", "slug": "tenant"}.get(error.param or "")
    return Form(values=values, errors={field: sentence(error.message)}) if field else Form.refused(values, error)
