"""Every route of the control plane, as stranger, tenant, viewer and operator: generated, so new ones are covered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from litestar import get, post
from litestar.routes import HTTPRoute

from controlplane.accounts.guards import OWN_CHECK, READING, VIEWER_MAY_POST, is_public
from controlplane.app import Application, Role, create_app
from controlplane.settings import Settings
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in

OPEN = {"/healthz", "/login", "/api/v1/openapi.json", "/static/{file_path}"}
"""What strangers may see, written down a second time on purpose."""


@dataclass(frozen=True)
class Call:
    """One method of one route, with its parameters filled in."""

    method: str
    template: str
    path: str

    @property
    def api(self) -> bool:
        return self.template.startswith("/api/")

    @property
    def internal(self) -> bool:
        return self.template.startswith("/internal/")

    @property
    def changes(self) -> bool:
        return self.method not in READING


def calls_of(app: Application) -> Iterator[Call]:
    values = {"uuid": str(uuid4()), "path": "nothing.css", "str": "acme", "int": "1"}
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            path = route.path
            for kind, value in values.items():
                for name, parameter in route.path_parameters.items():
                    if parameter.full.endswith(f":{kind}"):
                        path = path.replace(f"{{{name}:{kind}}}", value)
            for method in sorted(route.methods - {"OPTIONS"}):
                yield Call(method, route.path_format, path)


async def answer_to(app: Application, call: Call, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Status and headers of the response's start; the client hangs up then, so endless streams answer too."""
    begun: asyncio.Future[tuple[int, dict[str, str]]] = asyncio.get_running_loop().create_future()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await asyncio.wait({begun})
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start" and not begun.done():
            pairs = {name.decode(): value.decode() for name, value in message["headers"]}
            begun.set_result((message["status"], pairs))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": ("127.0.0.1", 40000),
        "server": ("console.example", 80),
        "headers": [
            (name.encode(), value.encode())
            for name, value in {"host": "console.example", "content-type": "application/json", **headers}.items()
        ],
    }
    await asyncio.wait_for(app(scope, receive, send), 20)
    return begun.result()


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings) as running:
        yield running


async def browser(deployed: Deployment, email: str | None = None) -> dict[str, str]:
    """Headers of a browser with a valid CSRF token, logged in as `email`."""
    if email is None:
        token = await csrf_of(deployed.client)
    else:
        await log_in(deployed, email)
        token = await csrf_of(deployed.client, "/tenants")
    cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in deployed.client.cookies.jar)
    return {"cookie": cookies, "x-csrftoken": token, "accept": "text/html"}


def refused(call: Call, status: int, headers: dict[str, str]) -> bool:
    if status == 303:
        return headers["location"].startswith("/login")
    return status in {401, 403}


async def test_the_open_routes_are_exactly_those_written_here(deployed: Deployment) -> None:
    assert {call.template for call in calls_of(deployed.app) if is_public(call.template)} == OPEN
    assert {"/metrics"} == OWN_CHECK
    assert {"/logout"} == VIEWER_MAY_POST


async def test_f36_a_stranger_gets_in_nowhere(deployed: Deployment) -> None:
    with_csrf = await browser(deployed)
    walked = 0
    for call in calls_of(deployed.app):
        if not is_public(call.template):
            walked += 1
            for headers in ({}, with_csrf, {"authorization": "Bearer "}, {"authorization": "Basic Og=="}):
                status, answered = await answer_to(deployed.app, call, headers)
                assert refused(call, status, answered), (call, status)
    assert walked > 20


async def test_f36_a_tenants_key_opens_nothing_here(deployed: Deployment) -> None:
    page = await browser(deployed)
    for call in calls_of(deployed.app):
        if not is_public(call.template):
            for headers in (deployed.tenant_member, {**page, **deployed.tenant_member}):
                status, answered = await answer_to(deployed.app, call, headers)
                assert refused(call, status, answered), (call, status)


async def test_a_viewer_may_look_but_change_nothing(deployed: Deployment) -> None:
    page = await browser(deployed, deployed.viewer_email)
    for call in calls_of(deployed.app):
        if is_public(call.template) or call.internal or call.template in OWN_CHECK | VIEWER_MAY_POST:
            continue
        status, _ = await answer_to(deployed.app, call, deployed.viewer if call.api else page)
        if call.changes:
            assert status == 403, (call, status)
        else:
            assert status in {200, 400, 404}, (call, status)


async def test_an_operator_is_let_through_everywhere(deployed: Deployment) -> None:
    page = await browser(deployed, deployed.operator_email)
    for call in calls_of(deployed.app):
        if call.internal or is_public(call.template) or call.template in OWN_CHECK | VIEWER_MAY_POST:
            continue
        status, answered = await answer_to(deployed.app, call, deployed.operator if call.api else page)
        assert not refused(call, status, answered), (call, status)
        assert status < 500, (call, status)


async def test_the_admin_api_refuses_query_parameters_it_does_not_know(deployed: Deployment) -> None:
    walked = 0
    for call in calls_of(deployed.app):
        if call.api:
            walked += 1
            answer = await deployed.client.request(
                call.method, call.path, params={"tenent": "x"}, headers=deployed.operator
            )
            if call.method != "HEAD":
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tenent"), (call, answer.text)
    assert walked > 15
    for path, name, known in (
        ("/api/v1/usage?cursor=x", "cursor", "after, limit, since, tenant, until"),
        ("/api/v1/overview?window=3600", "window", "replica, tenant, window_s"),
        ("/api/v1/pools?x=", "x", "none"),
    ):
        error = (await deployed.client.get(path, headers=deployed.viewer)).json()["error"]
        assert error["message"] == f"there is no query parameter {name!r} here; it takes {known}"
        assert error["code"] == "unknown_parameter"
    assert (await deployed.client.get("/api/v1/tenants?x=1")).status_code == 401
    assert (await deployed.client.get("/login?utm_source=mail")).status_code == 200


async def test_credentials_do_not_cross_surfaces(deployed: Deployment) -> None:
    """A session opens no API (so no CSRF there), an admin token no page, neither of them the internal routes."""
    page = await browser(deployed, deployed.operator_email)
    for call in calls_of(deployed.app):
        if is_public(call.template) or call.template in OWN_CHECK:
            continue
        if call.api:
            wrong = [page]
        elif call.internal:
            wrong = [page, deployed.operator, deployed.tenant_member]
        else:
            wrong = [deployed.operator]
        for headers in wrong:
            status, answered = await answer_to(deployed.app, call, headers)
            assert refused(call, status, answered), (call, status)


async def test_a_page_that_changes_something_needs_the_csrf_token(deployed: Deployment) -> None:
    page = await browser(deployed, deployed.operator_email)
    without = {name: value for name, value in page.items() if name != "x-csrftoken"}
    walked = 0
    for call in calls_of(deployed.app):
        if call.changes and not call.api and not call.internal:
            walked += 1
            for headers in (without, {**page, "x-csrftoken": "0" * 128}):
                status, _ = await answer_to(deployed.app, call, headers)
                assert status == 403, (call, status)
    assert walked >= 6


async def test_a_form_sent_from_another_site_is_refused_even_with_the_token(deployed: Deployment) -> None:
    page = await browser(deployed, deployed.operator_email)
    call = Call("POST", "/tenants/{slug}/deactivate", "/tenants/acme/deactivate")
    status, _ = await answer_to(deployed.app, call, {**page, "sec-fetch-site": "cross-site"})
    assert status == 403


async def test_a_route_nobody_thought_of_is_closed(deployed: Deployment) -> None:
    @get("/api/v1/forgotten")
    async def forgotten() -> str:
        return "secret"

    @post("/forgotten-page")
    async def forgotten_page() -> str:
        return "secret"

    deployed.app.register(forgotten)
    deployed.app.register(forgotten_page)
    added = [call for call in calls_of(deployed.app) if "forgotten" in call.path]
    assert len(added) == 2
    page = await browser(deployed)
    for call in added:
        status, answered = await answer_to(deployed.app, call, page)
        assert refused(call, status, answered)


async def test_the_path_a_client_types_plays_no_part(deployed: Deployment) -> None:
    for path in (
        "/static/../tenants",
        "/login/../tenants",
        "//tenants",
        "/tenants/",
        "/api/v1/tenants/",
        "/API/v1/tenants",
    ):
        status, answered = await answer_to(deployed.app, Call("GET", "", path), {"accept": "text/html"})
        assert status in {303, 401, 404}, (path, status)
        if status == 303:
            assert answered["location"].startswith("/login")


async def test_the_gateway_role_serves_nothing_of_the_control_plane(settings: Settings) -> None:
    app = create_app(Role.GATEWAY, settings)
    templates = {route.path_format for route in app.routes}
    assert not any(template.startswith(("/api", "/internal", "/login", "/tenants")) for template in templates)
