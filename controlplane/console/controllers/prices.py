"""The Prices page: what use of pools costs, with its history. Layer: service. The price service decides."""

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
from controlplane.console import confirmations, forms
from controlplane.console.flash import go
from controlplane.console.pages import AnyRequest, Console, Form
from controlplane.errors import ConflictError, InvalidRequestError
from controlplane.quotas import price_service as service
from controlplane.quotas.views import PriceSpec

ROWS = 50
BODY_LIMIT = 64 * 1024


class PriceForm(msgspec.Struct, frozen=True):
    pool: str = ""
    uncached_input: str = ""
    cached_input: str = ""
    output: str = ""
    device_second: str = ""
    valid_from: str = ""
    idempotency_key: str | None = None


@get("/prices", include_in_schema=False)
async def prices(
    *,
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    after: FromQuery[str | None] = None,
) -> Response[str]:
    context = await _context(session, after=after)
    return console.answer(request, "quotas/prices.html", user=current_user, section="prices", **context)


@post("/prices", include_in_schema=False, status_code=200, request_max_body_size=BODY_LIMIT)
async def set_price(
    request: AnyRequest,
    session: NamedDependency[AsyncSession],
    current_user: NamedDependency[Principal],
    console: NamedDependency[Console],
    data: URLEncodedBody[PriceForm],
) -> Response[str] | Redirect:
    try:
        spec = _spec(data)
        price = await service.set_price(session, spec, by=current_user.name, idempotency_key=data.idempotency_key)
    except (InvalidRequestError, ConflictError) as error:
        values = {name: str(value) for name, value in asdict(data).items() if name != "idempotency_key"}
        context = await _context(session, form=Form.refused(values, error))
        return console.answer(request, "quotas/prices.html", user=current_user, section="prices", status=422, **context)
    return go(request, "/prices", confirmations.price_set(price, planned=spec.valid_from is not None))


@post("/prices/{price_id:uuid}/take-back", include_in_schema=False, status_code=303)
async def take_back(
    request: AnyRequest, session: NamedDependency[AsyncSession], price_id: FromPath[UUID]
) -> Response[str] | Redirect:
    price = await service.take_back(session, price_id)
    return go(request, "/prices", confirmations.price_taken_back(price))


PAGES = [prices, set_price, take_back]


async def _context(session: AsyncSession, *, after: str | None = None, form: Form | None = None) -> dict[str, Any]:
    page = await service.list_prices(session, after=after, limit=ROWS)
    return {"page": page, "after": after, "form": form or Form(), "now": time.time()}


def _spec(data: PriceForm) -> PriceSpec:
    return PriceSpec(
        pool=forms.word(data.pool),
        uncached_input=forms.required("uncached_input", data.uncached_input),
        cached_input=forms.required("cached_input", data.cached_input),
        output=forms.required("output", data.output),
        device_second=forms.whole("device_second", data.device_second) or 0,
        valid_from=forms.instant("valid_from", data.valid_from),
    )
