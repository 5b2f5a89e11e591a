"""/metrics of gateway and control plane.

Layer: service. Serves the process's own registry to whoever has the metrics token (the internal token when none is
set), or to anybody when configured open. It adds no labels of its own. On the control plane it first brings the
gauges that live in the database up to date; when the database is away it serves what it has.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from litestar import Request, Response, get
from litestar.datastructures import State
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from controlplane.component import Component, Resources
from controlplane.errors import AuthenticationError
from controlplane.settings import Settings
from controlplane.telemetry.scrape import DatabaseGauges

if TYPE_CHECKING:
    from controlplane.app import Role


@get("/metrics", include_in_schema=False, operation_id="metrics")
async def metrics(request: Request[Any, Any, Any], state: State) -> Response[bytes]:
    """The registry in Prometheus' text format."""
    resources: Resources = state.resources
    require_metrics_token(resources.settings, request.headers.get("authorization", ""))
    gauges: DatabaseGauges | None = state.get("database_gauges")
    if gauges is not None:
        await gauges.refresh()
    body = generate_latest(resources.registry)
    return Response(body, media_type=CONTENT_TYPE_LATEST, headers={"cache-control": "no-store"})


def require_metrics_token(settings: Settings, authorization: str) -> None:
    """Raises AuthenticationError unless the right bearer token came or /metrics is configured open (F32)."""
    if settings.metrics_open:
        return
    expected = (settings.metrics_token or settings.internal_token).reveal()
    scheme, _, token = authorization.partition(" ")
    good = hmac.compare_digest(token.strip().encode(), expected.encode())
    if not (expected and scheme.lower() == "bearer" and good):
        raise AuthenticationError(
            "metrics need the metrics token: Authorization: Bearer <token>",
            code="invalid_metrics_token",
            headers={"www-authenticate": "Bearer"},
        )


def component(resources: Resources, role: Role) -> Component:
    """The route. What the control plane's gauges read is put on the state by telemetry's component."""
    return Component(routes=[metrics])
