"""Who may call which route of the control plane.

Layer: service. `authorize` guards the whole application and denies by default: a route nobody thought of asks for
an operator or viewer, and changing anything asks for an operator. The exceptions stand in this file and nowhere
else. API paths take a bearer token only, pages a session only; a tenant's API key opens nothing here.
"""

from __future__ import annotations

import hmac
from typing import Any

from litestar.connection import ASGIConnection, Request
from litestar.handlers.base import BaseRouteHandler

from controlplane.accounts import service
from controlplane.accounts.browser import LoginRequiredError
from controlplane.accounts.csrf import READING
from controlplane.accounts.schemas import Principal
from controlplane.component import Resources
from controlplane.errors import AuthenticationError, PermissionDeniedError

PUBLIC = frozenset({"/healthz", "/login", "/api/v1/openapi.json"})
"""Route templates open to strangers."""
PUBLIC_PREFIXES = ("/static",)
"""Files of the console; they hold nothing of anybody."""
OWN_CHECK = frozenset({"/metrics"})
"""Guarded by its own token (`telemetry.prometheus`)."""
VIEWER_MAY_POST = frozenset({"/logout"})
"""Changes that concern only the viewer itself."""

Connection = ASGIConnection[Any, Any, Any, Any]


async def authorize(connection: Connection, handler: BaseRouteHandler) -> None:
    """The control plane's guard for every route."""
    template = route_template(connection)
    if is_public(template) or template in OWN_CHECK:
        return
    if template.startswith("/internal/"):
        _require_internal(connection)
        return
    if connection.scope.get("method", "GET") in READING or template in VIEWER_MAY_POST:
        await require_viewer(connection, handler)
    else:
        await require_operator(connection, handler)


async def require_viewer(connection: Connection, _: BaseRouteHandler) -> None:
    """Anybody with an account or an admin token. Raises AuthenticationError."""
    await principal(connection)


async def require_operator(connection: Connection, _: BaseRouteHandler) -> None:
    """Somebody who may change things. Raises AuthenticationError or PermissionDeniedError."""
    who = await principal(connection)
    if not who.may_change:
        raise PermissionDeniedError(f"{who.name} may look but not change anything", code="read_only")


async def principal(connection: Connection) -> Principal:
    """Who sent this request, looked up once. Raises AuthenticationError."""
    known = connection.scope.get("user")
    if isinstance(known, Principal):
        return known
    if route_template(connection).startswith("/api/"):
        resources: Resources = connection.app.state.resources
        found = await service.principal_of_token(resources, bearer(connection))
        if found is None:
            raise AuthenticationError(
                "this needs a valid admin token: Authorization: Bearer <token>",
                code="invalid_admin_token",
                headers={"www-authenticate": "Bearer"},
            )
    else:
        found = await service.principal_of_session(connection)
        if found is None:
            raise LoginRequiredError("please log in")
    connection.scope["user"] = found
    return found


def provide_current_user(request: Request[Any, Any, Any]) -> Principal:
    """Dependency `current_user`, on routes that `authorize` let through to a principal."""
    user: Principal = request.user
    return user


def is_public(template: str) -> bool:
    """Whether strangers may call the route."""
    return template in PUBLIC or any(
        template == prefix or template.startswith(f"{prefix}/") for prefix in PUBLIC_PREFIXES
    )


def route_template(connection: Connection) -> str:
    """The route's own path, with parameters as they were declared: what the client typed plays no part."""
    template: str = connection.scope["path_template"]
    return template


def bearer(connection: Connection) -> str:
    """The bearer token presented, or ""."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _require_internal(connection: Connection) -> None:
    resources: Resources = connection.app.state.resources
    expected = resources.settings.internal_token.reveal()
    if not expected or not hmac.compare_digest(bearer(connection).encode(), expected.encode()):
        raise AuthenticationError("this needs the internal token", code="invalid_internal_token")
