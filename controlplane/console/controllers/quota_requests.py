"""The page of one request for more, where an operator decides it, and how many wait. Layer: service.

`request_service` decides. A refused form is shown again.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, URLEncodedBody
from litestar.response import Redirect
from msgspec.structs import asdict
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Principal
from controlplane.console import forms
from controlplane.console.confirmations import request_decided
from controlplane.console.controllers.quotas import BODY_LIMIT, KINDS
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, Form
from controlplane.errors import ConflictError, InvalidRequestError
from controlplane.quotas import request_service, service
from controlplane.quotas.views import ApprovalSpec, QuotaRequestView, QuotaView

MOST_COUNTED = 100


class DecisionForm(msgspec.Struct, frozen=True):
    decision: str = ""
    amount: str = ""
    until: str = ""
    note: str = ""


@get("/quota-requests/waiting", include_in_schema=False)
async def waiting(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
) -> Response[str]:
    number = await request_service.count_waiting(session, MOST_COUNTED)
    return console.answer(request, "quotas/_waiting.html", user=current_user, waiting=number, most=MOST_COUNTED)


@get("/quota-requests/{request_id:uuid}", include_in_schema=False)
async def quota_request(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    request_id: FromPath[UUID],
) -> Response[str]:
    context = await _context(session, request_id)
    return console.answer(request, "quotas/request.html", user=current_user, section="quotas", **context)


@post("/quota-requests/{request_id:uuid}", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def decide(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    request_id: FromPath[UUID],
    data: URLEncodedBody[DecisionForm],
) -> Response[str] | Redirect:
    try:
        decided = await _decide(session, request_id, data, current_user.name)
    except (InvalidRequestError, ConflictError) as error:
        form = Form.refused({name: str(value) for name, value in asdict(data).items()}, error)
        context = await _context(session, request_id, form)
        return console.answer(
            request, "quotas/request.html", user=current_user, section="quotas", status=422, **context
        )
    return go(request, f"/quota-requests/{request_id}", request_decided(decided))


PAGES = [waiting, quota_request, decide]


async def _decide(session: AsyncSession, request_id: UUID, data: DecisionForm, by: str) -> QuotaRequestView:
    if data.decision == "decline":
        return await request_service.decline(session, request_id, by=by, note=data.note)
    if data.decision != "approve":
        raise InvalidRequestError("approve or decline it", param="decision")
    given = ApprovalSpec(
        amount=forms.required("amount", data.amount), until=forms.instant("until", data.until), note=data.note
    )
    return await request_service.approve(session, request_id, by=by, given=given)


async def _context(session: AsyncSession, request_id: UUID, form: Form | None = None) -> dict[str, Any]:
    asked = await request_service.get_request(session, request_id)
    quota = None if asked.quota_id is None else await service.get_quota(session, asked.quota_id)
    return {
        "asked": asked,
        "quota": quota,
        "in_force": None if quota is None or quota.hard is None else quota.hard + quota.raised,
        "form": form or Form(_as_asked(asked, await _held(session, asked, quota))),
        "kinds": dict(KINDS),
    }


async def _held(session: AsyncSession, asked: QuotaRequestView, quota: QuotaView | None) -> int | None:
    """The hard limit that holds for as long as more is wanted, raises counted."""
    if quota is None or asked.until is None:
        return None if quota is None else quota.hard
    return await service.lowest_hard(session, quota.id, asked.until)


def _as_asked(asked: QuotaRequestView, hard: int | None) -> dict[str, str]:
    until = "" if asked.until is None else asked.until.strftime("%Y-%m-%dT%H:%M")
    return {"amount": str(max(0, request_service.missing(asked, hard))), "until": until, "note": ""}
