"""/v1 as OpenAI clients know it: which path and method does what, and every failure in OpenAI's shape.

Layer: service. Raw ASGI, mounted into the application. It must never read more of a request than its head before the
key is known to be good.
"""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import uuid4

import msgspec
from litestar.enums import ScopeType
from litestar.types import HTTPScope, Receive, Scope, Send

from controlplane.errors import NotFoundError, TidegateError
from controlplane.gateway.asgi import JSON_TYPE, RequestHead, discard_body, respond, respond_error
from controlplane.gateway.errors import ClientGoneError, MethodNotAllowedError
from controlplane.gateway.exchange import Exchange
from controlplane.gateway.gateway import Gateway
from controlplane.gateway.models import list_models, one_model
from controlplane.gateway.paths import INFERENCE, MODELS
from controlplane.gateway.quota_routes import PREFIX as QUOTA
from controlplane.gateway.quota_routes import QuotaRoutes
from controlplane.gateway.record import Outcome, RequestRecord
from controlplane.tenants.schemas import KeyGrant
from dataplane.protocol import HEADER_REQUEST

logger = logging.getLogger("tidegate.gateway")


class Endpoint:
    """Serves everything below /v1."""

    def __init__(self, gateway: Gateway, quotas: QuotaRoutes | None = None) -> None:
        self._gateway = gateway
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        arrived = time.monotonic()
        request_id = scope.get("state", {}).get("request_id") or uuid4().hex
        head = RequestHead(scope)
        gateway = self._gateway
        path = scope["path"].rstrip("/")
        inference = path in INFERENCE
        tenant = ""
        try:
            if not self._is_quota(path):
                _check_route(scope, path)
            grant = await gateway.keys.authenticate(head.authorization)
            tenant = grant.tenant
            if self._quotas is not None and self._is_quota(path):
                body = await self._quotas.answer(scope, path, head, grant, receive)
                gateway.metrics.answered(grant.tenant, 200)
                await respond(send, 200, body, [JSON_TYPE, (HEADER_REQUEST.encode(), request_id.encode())])
                return
            if not inference:
                await self._models(path, grant, send, request_id)
                return
        except ClientGoneError:
            return
        except TidegateError as error:
            if inference:
                record = RequestRecord(request_id=request_id, grant=None, at=time.time(), accepted=arrived)
                record.conclude(Outcome.REFUSED, error.code, error.status)
                gateway.settle(record)
            else:
                gateway.metrics.answered(tenant, error.status)
            await discard_body(head, receive)
            await respond_error(send, error, request_id)
            return
        finally:
            gateway.forged(tenant, head.forged)
        await Exchange(gateway, grant, path, request_id, arrived).serve(head, receive, send)

    def _is_quota(self, path: str) -> bool:
        return self._quotas is not None and (path == QUOTA or path.startswith(QUOTA + "/"))

    async def _models(self, path: str, grant: KeyGrant, send: Send, request_id: str) -> None:
        fleet = self._gateway.fleet
        if path == MODELS:
            answer: Any = list_models(fleet, grant)
        else:
            answer = one_model(fleet, grant, path.removeprefix(MODELS + "/"))
        body = msgspec.json.encode(answer)
        self._gateway.metrics.answered(grant.tenant, 200)
        await respond(send, 200, body, [JSON_TYPE, (HEADER_REQUEST.encode(), request_id.encode())])


def _check_route(scope: HTTPScope, path: str) -> None:
    """Raises NotFoundError for a path nobody serves, MethodNotAllowedError for the wrong method."""
    method = scope["method"]
    if path in INFERENCE:
        allowed = "POST"
    elif path == MODELS or path.startswith(MODELS + "/"):
        allowed = "GET"
    else:
        raise NotFoundError(f"There is no {method} /v1{path[:100]}.", code="unknown_url")
    if method != allowed:
        raise MethodNotAllowedError(f"Use {allowed} on /v1{path[:100]}.", headers={"allow": allowed})
