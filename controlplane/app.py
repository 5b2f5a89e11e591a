"""The application factory: one process's routes, resources and error handling.

Layer: service. Composes the components of a role's domains; it knows no domain's rules. The stores are opened
lazily: the application starts while Postgres or Redis is away. Handlers get `session`, one transaction for the
request that is committed before the answer leaves; application code never commits.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Scope
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane import error_responses, openapi, query_parameters, request_id
from controlplane.component import Component, Lifespan, Resources
from controlplane.db import acting_as, create_engine, transaction
from controlplane.errors import TidegateError
from controlplane.health import HealthProbe, healthz
from controlplane.redis_client import create_redis
from controlplane.settings import Settings


class Role(enum.StrEnum):
    """What one process serves."""

    GATEWAY = "gateway"
    CONTROL = "control"


DOMAINS = {
    Role.GATEWAY: ("gateway",),
    Role.CONTROL: (
        "tenants",
        "quotas",
        "slo",
        "accounts",
        "fleet",
        "telemetry",
        "ledger",
        "canaries",
        "promptlog",
        "policy",
        "console",
    ),
}


class Application(Litestar):
    """Litestar with a request id, and on the control plane security headers, on every response (errors too).

    What is below `direct_path` goes straight to `direct`, past the framework's router and error handling, which cost a
    relayed token or request as much as the gateway's own reading of it: `direct` answers its errors and names the
    request itself.
    """

    extra_headers: tuple[tuple[bytes, bytes], ...] = ()
    direct_path: str = ""
    direct: ASGIApp | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope.setdefault("state", {})
        identifier = request_id.assign(scope)
        if self.direct is not None and scope["path"].startswith(self.direct_path):
            scope["path"] = scope["path"][len(self.direct_path) - 1 :]
            await self.direct(scope, receive, send)
            return
        headers = ((b"x-request-id", identifier), *self.extra_headers)

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in headers if pair[0] not in present)]
            await send(message)

        await super().__call__(scope, receive, answer)


def create_app(role: Role, settings: Settings | None = None, *, domains: Sequence[str] | None = None) -> Application:
    """The application of `role`. `domains` restricts the control plane to some of its domains; /metrics then stays out.

    Raises SettingsError when the environment is incomplete.
    """
    settings = settings or Settings.from_env()
    resources = Resources(
        settings=settings,
        engine=create_engine(settings),
        redis=create_redis(settings.redis_url),
        registry=CollectorRegistry(),
    )
    components: list[Component] = [
        importlib.import_module(f"controlplane.{name}.component").component(resources)
        for name in (DOMAINS[role] if domains is None else domains)
    ]
    if domains is None:
        components.append(importlib.import_module("controlplane.telemetry.prometheus").component(resources, role))
    common = _common(role, resources, components)
    return _control(settings, common) if role is Role.CONTROL else _gateway(common, components)


def _gateway(common: dict[str, Any], components: Sequence[Component]) -> Application:
    """The routes under a component's `direct` path are served without the framework in between."""
    app = Application(**common, openapi_config=None)
    for part in components:
        if part.direct is not None:
            app.direct_path, app.direct = part.direct
    return app


def _control(settings: Settings, common: dict[str, Any]) -> Application:
    """What only the control plane has: people, so guards, CSRF, pages for errors, and a documented API."""
    from controlplane.accounts import browser
    from controlplane.accounts.csrf import CsrfMiddleware
    from controlplane.accounts.guards import authorize, provide_current_user
    from controlplane.console.templates import Templates

    common["state"].setdefault("templates", Templates())
    common["exception_handlers"][browser.LoginRequiredError] = browser.on_login_required
    common["dependencies"]["current_user"] = Provide(provide_current_user, sync_to_thread=False)
    app = Application(
        **common,
        guards=[authorize, query_parameters.refuse_unknown],
        middleware=[CsrfMiddleware()],
        openapi_config=openapi.config(),
    )
    app.extra_headers = browser.security_headers(settings)
    return app


def _common(role: Role, resources: Resources, components: Sequence[Component]) -> dict[str, Any]:
    state: dict[str, Any] = {"resources": resources}
    lifespans = [_lifespan(resources, role)]
    routes: list[Any] = [healthz]
    for part in components:
        state |= part.state
        lifespans += part.lifespans
        routes += part.routes
    return {
        "route_handlers": routes,
        "lifespan": lifespans,
        "state": State(state),
        "dependencies": {
            "session": Provide(provide_session),
            "resources": Provide(provide_resources, sync_to_thread=False),
            "health": Provide(provide_health, sync_to_thread=False),
        },
        "exception_handlers": {
            TidegateError: error_responses.on_expected,
            HTTPException: error_responses.on_http,
            Exception: error_responses.on_unexpected,
        },
        "request_max_body_size": resources.settings.max_body_bytes,
        "logging_config": None,
        "debug": False,
    }


async def provide_session(state: State, scope: Scope) -> AsyncIterator[AsyncSession]:
    """The request's one transaction, in the name of whoever sent it where it may change something."""
    who = str(getattr(scope.get("user"), "name", ""))
    async with transaction(state.resources.engine) as session:
        if who and scope.get("method") not in {"GET", "HEAD"}:
            await acting_as(session, who)
        yield session


def provide_resources(state: State) -> Resources:
    """What the process shares."""
    resources: Resources = state.resources
    return resources


def provide_health(state: State) -> HealthProbe:
    """The process's health probe."""
    probe: HealthProbe = state.health
    return probe


def _lifespan(resources: Resources, role: Role) -> Lifespan:
    @asynccontextmanager
    async def open_and_close(app: Litestar) -> AsyncIterator[None]:
        app.state.health = HealthProbe(resources, role.value)
        try:
            yield
        finally:
            await resources.redis.aclose()
            await resources.engine.dispose()

    return open_and_close
