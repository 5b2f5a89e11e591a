"""`/v1/quota`: what a tenant's key may see of its limits, and how it asks for more.

Layer: service. Below the gateway's endpoint, which has authenticated the key: tenant, project and key come from its
grant alone. Standings come from the store and the ledger (`quota_use`), the rest from Postgres (`quota_desk`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from litestar.types import HTTPScope, Receive

from controlplane.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, TidegateError
from controlplane.gateway import quota_views as views
from controlplane.gateway.asgi import RequestHead, body_slices, read_body
from controlplane.gateway.errors import ClientGoneError, MethodNotAllowedError
from controlplane.gateway.key_ration import Ration
from controlplane.gateway.quota_desk import QuotaDesk
from controlplane.gateway.quota_use import LimitUse, UseReader
from controlplane.gateway.quotas import QuotaDirectory, TenantLimits
from controlplane.quotas.forecast import Forecast, Outcome, Rate, forecast
from controlplane.quotas.limits import effective
from controlplane.quotas.schemas import Limit, QuotaLevel
from controlplane.quotas.views import MoreSpec
from controlplane.quotas.windows import zone_of
from controlplane.telemetry.refusals import BUCKETS
from controlplane.tenants.schemas import KeyGrant, Scope

PREFIX = "/quota"
FORECAST, REFUSALS, REQUESTS = "/quota/forecast", "/quota/refusals", "/quota/requests"
LARGEST_BODY = 16 * 1024
LARGEST_PAGE = 100
LARGEST_FORECAST = 20
"""Limits of one forecast; each may cost two queries."""
PER_KEY, PER_TENANT = (2.0, 30.0), (10.0, 120.0)
"""Questions a second on the long run, and at once."""

logger = logging.getLogger("tidegate.gateway")

_MORE = msgspec.json.Decoder(MoreSpec)
_encode = msgspec.json.Encoder().encode


class QuotaRoutes:
    """Answers the routes. Raises TidegateError for whatever is not answered with 200."""

    def __init__(
        self, quotas: QuotaDirectory, use: UseReader, desk: QuotaDesk, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._quotas = quotas
        self._use = use
        self._desk = desk
        self._wall = wall
        self._bodies = body_slices()
        self._per_key, self._per_tenant = Ration(*PER_KEY), Ration(*PER_TENANT)

    async def answer(self, scope: HTTPScope, path: str, head: RequestHead, grant: KeyGrant, receive: Receive) -> bytes:
        """The body that answers one request of `grant` on `path` (below /v1)."""
        try:
            return _encode(await self._found(scope, path, head, grant, receive))
        except (TidegateError, ClientGoneError):
            raise
        except Exception as error:
            logger.exception("A question about quotas failed in the gateway")
            raise TidegateError("The gateway failed to handle this request.") from error

    async def _found(self, scope: HTTPScope, path: str, head: RequestHead, grant: KeyGrant, receive: Receive) -> Any:
        method = scope["method"]
        _check(method, path, grant)
        self._per_key.spend(grant.identity or grant.key_id)
        self._per_tenant.spend(grant.tenant_id)
        if method == "POST":
            return await self._ask(scope, head, grant, receive)
        return await self._answer(path, grant, _Query(scope))

    async def _answer(self, path: str, grant: KeyGrant, query: _Query) -> Any:
        if path == PREFIX:
            return await self._limits(grant, query)
        if path == FORECAST:
            return await self._forecast(grant, query)
        if path == REFUSALS:
            window_s = query.whole("window", 3600, max(BUCKETS))
            query.done()
            return views.refusal_page(await self._desk.refusals(grant, window_s), self._wall())
        if path == REQUESTS:
            after, limit = query.text("after"), query.whole("limit", 50, LARGEST_PAGE)
            query.done()
            page = await self._desk.requests(grant, after=after, limit=limit)
            data = [views.more_request(one) for one in page.items]
            return views.QuotaList(data=data, has_more=page.next is not None, next=page.next)
        query.done()
        return views.more_request(await self._desk.request(grant, _id(path.removeprefix(REQUESTS + "/"))))

    async def _limits(self, grant: KeyGrant, query: _Query) -> views.QuotaList[views.Quota]:
        tenant = await self._quotas.of(grant.tenant_id)
        limits, more = _page(tenant, grant, query, LARGEST_PAGE)
        used = await self._use.of(grant, tenant, limits)
        zone, now = zone_of(tenant.quotas.time_zone), self._wall()
        data = [views.quota(limit, used[limit.quota_id], zone, now) for limit in limits]
        return views.QuotaList(data=data, has_more=more, next=data[-1].id if more else None)

    async def _forecast(self, grant: KeyGrant, query: _Query) -> views.QuotaList[views.QuotaForecast]:
        tenant = await self._quotas.of(grant.tenant_id)
        limits, more = _page(tenant, grant, query, LARGEST_FORECAST)
        used = await self._use.of(grant, tenant, limits)
        zone, now = zone_of(tenant.quotas.time_zone), self._wall()
        open_ones = [limit for limit in limits if _told(limit, used[limit.quota_id], now) is None]
        rates = await self._desk.rates(grant, open_ones) if open_ones else {}
        futures = [_future(limit, used[limit.quota_id], rates.get(limit.quota_id), now) for limit in limits]
        told = [
            views.quota_forecast(limit, used[limit.quota_id], one, rates.get(limit.quota_id), zone=zone, now=now)
            for limit, one in zip(limits, futures, strict=True)
        ]
        return views.QuotaList(data=told, has_more=more, next=told[-1].id if more else None)

    async def _ask(self, scope: HTTPScope, head: RequestHead, grant: KeyGrant, receive: Receive) -> views.MoreRequest:
        key = _idempotency_key(scope)
        body, _ = await read_body(head, receive, LARGEST_BODY, self._bodies)
        try:
            spec = _MORE.decode(body)
        except msgspec.ValidationError as error:
            told, _, where = str(error).partition(" - at `$.")
            raise InvalidRequestError(f"{told}.", param=where.rstrip("`") or None) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json") from None
        return views.more_request(await self._desk.ask(grant, spec, key))


class _Query:
    """A request's query parameters, each of which must be asked for once: `done` refuses those nobody knows."""

    def __init__(self, scope: HTTPScope) -> None:
        text = scope["query_string"][:4096].decode("latin-1")
        try:
            self._left = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=16))
        except ValueError:
            raise InvalidRequestError("There are too many query parameters.", code="unknown_parameter") from None

    def text(self, name: str) -> str | None:
        return self._left.pop(name, None)

    def whole(self, name: str, default: int, most: int) -> int:
        text = self._left.pop(name, str(default))
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most and len(text) < 10):
            raise InvalidRequestError(f"{name} must be a whole number from 1 to {most}.", param=name)
        return int(text)

    def done(self) -> None:
        if self._left:
            name = next(iter(self._left))[:100]
            raise InvalidRequestError(
                f"There is no query parameter {name!r} here.", code="unknown_parameter", param=name
            )


def _check(method: str, path: str, grant: KeyGrant) -> None:
    """Whether there is such a route, and whether the key may use it."""
    one = path.startswith(REQUESTS + "/")
    if path not in (PREFIX, FORECAST, REFUSALS, REQUESTS) and not one:
        raise NotFoundError(f"There is no {method} /v1{path[:100]}.", code="unknown_url")
    allowed = ("GET", "POST") if path == REQUESTS else ("GET",)
    if method not in allowed:
        names = ", ".join(allowed)
        raise MethodNotAllowedError(f"Use {names} on /v1{path[:100]}.", headers={"allow": names})
    scope = Scope.QUOTA_REQUEST if method == "POST" else Scope.QUOTA_READ
    if scope not in grant.scopes:
        raise PermissionDeniedError(f"This API key lacks the scope {scope.value!r}.", code="scope_missing")


def _page(tenant: TenantLimits, grant: KeyGrant, query: _Query, most: int) -> tuple[list[Limit], bool]:
    """One page of the limits that requests of the key must respect, and whether there are more."""
    after, model, size = query.text("after"), query.text("model"), query.whole("limit", most, most)
    query.done()
    mine = [limit for limit in tenant.quotas.limits if _concerns(limit, grant) and model in (None, limit.model)]
    start = 0
    if after is not None:
        places = [number for number, limit in enumerate(mine) if limit.quota_id == after]
        if not places:
            raise InvalidRequestError("after must be the id of a limit on the page before.", param="after")
        start = places[0] + 1
    return mine[start : start + size], len(mine) > start + size


def _concerns(limit: Limit, grant: KeyGrant) -> bool:
    whose = {
        QuotaLevel.TENANT: grant.tenant_id,
        QuotaLevel.PROJECT: grant.project_id,
        QuotaLevel.KEY: grant.identity,
    }
    usable = not limit.model or grant.allowed_models is None or limit.model in grant.allowed_models
    return limit.scope_id == whose[limit.level] and usable


def _told(limit: Limit, use: LimitUse, now: float) -> Forecast | None:
    """What can be said of a limit without its rate; None when that is needed."""
    _, hard = effective(limit, now)
    if hard is None or views.window_of(limit.kind) in (views.Window.REQUEST, views.Window.IN_FLIGHT):
        return Forecast(outcome=Outcome.NOT_APPLICABLE)
    return Forecast(outcome=Outcome.UNKNOWN) if use.total is None else None


def _future(limit: Limit, use: LimitUse, rate: Rate | None, now: float) -> Forecast:
    told = _told(limit, use, now)
    if told is not None or rate is None or use.total is None or limit.hard is None:
        return told or Forecast(outcome=Outcome.UNKNOWN)
    sliding = views.window_of(limit.kind) is views.Window.SLIDING_MINUTE
    resets_at = now + views.MINUTE_S if sliding or use.resets_at is None else use.resets_at
    return forecast(limit.hard, limit.raises, used=use.total, rate=rate, now=now, resets_at=resets_at)


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise NotFoundError("There is no such request.", code="request_not_found", param="request_id") from None


def _idempotency_key(scope: HTTPScope) -> str | None:
    text = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"idempotency-key"), None)
    if text is not None and not (1 <= len(text) <= 128 and text.isprintable()):
        raise InvalidRequestError("Idempotency-Key must have 1 to 128 printable characters.", param="idempotency-key")
    return text
