"""What a browser is given and what it is refused: cookies, redirects, CSRF."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import msgspec
import pytest

from controlplane.accounts import browser, csrf
from controlplane.settings import Secret, Settings
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in
from tests.factories.rows import PASSWORD


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "accounts", "console"]) as running:
        yield running


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, "/"),
        ("", "/"),
        ("/", "/"),
        ("/tenants?after=x", "/tenants?after=x"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/x\\y", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("tenants", "/"),
        ("/a\r\nSet-Cookie: x=y", "/"),
        ("/\t/evil.example", "/"),
        ("/login?next=/", "/"),
    ],
)
def test_after_a_login_only_paths_of_this_console_are_gone_to(target: str | None, expected: str) -> None:
    assert browser.safe_next(target) == expected


async def test_a_stranger_is_sent_to_the_login_page_and_back(deployed: Deployment) -> None:
    asked = await deployed.client.get("/tenants?after=x", headers={"accept": "text/html"})
    assert asked.status_code == 303
    assert asked.headers["location"] == "/login?next=/tenants%3Fafter%3Dx"
    assert (await deployed.client.get("/", headers={"accept": "text/html"})).headers["location"] == "/login"
    token = await csrf_of(deployed.client)
    form = {"email": deployed.viewer_email, "password": PASSWORD, "next": "/tenants", "_csrf_token": token}
    assert (await deployed.client.post("/login", data=form)).headers["location"] == "/tenants"


async def test_a_fragment_makes_htmx_go_to_the_login_page_and_a_stream_just_ends(deployed: Deployment) -> None:
    fragment = await deployed.client.get("/tenants", headers={"hx-request": "true"})
    assert (fragment.status_code, fragment.headers["hx-redirect"]) == (401, "/login")
    stream = await deployed.client.get("/events/overview", headers={"accept": "text/event-stream"})
    assert stream.status_code == 401
    assert "location" not in stream.headers


async def test_the_session_cookie_is_kept_from_scripts_and_other_sites(deployed: Deployment) -> None:
    token = await csrf_of(deployed.client)
    form = {"email": deployed.operator_email, "password": PASSWORD, "_csrf_token": token}
    answer = await deployed.client.post("/login", data=form)
    cookie = next(c for c in answer.headers.get_list("set-cookie") if c.startswith("tidegate_session="))
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert "Path=/" in cookie
    assert "Secure" not in cookie


def test_over_tls_the_cookie_is_secure_and_bound_to_the_host(settings: Settings) -> None:
    tls = msgspec.structs.replace(settings, cookie_secure=True)
    cookie = browser.session_cookie(tls, Secret("token"), timedelta(hours=1))
    assert (cookie.key, cookie.secure, cookie.httponly, cookie.path) == ("__Host-tidegate_session", True, True, "/")
    assert browser.ended_cookie(tls).max_age == 0
    assert b"strict-transport-security" in dict(browser.security_headers(tls))
    assert b"strict-transport-security" not in dict(browser.security_headers(settings))


async def test_a_login_without_the_csrf_token_is_refused(deployed: Deployment) -> None:
    form = {"email": deployed.operator_email, "password": PASSWORD}
    assert (await deployed.client.post("/login", data=form)).status_code == 403
    await csrf_of(deployed.client)
    assert (await deployed.client.post("/login", data={**form, "_csrf_token": "0" * 128})).status_code == 403
    assert "tidegate_session" not in deployed.client.cookies


async def test_the_token_of_another_browser_is_refused(deployed: Deployment) -> None:
    theirs = await csrf_of(deployed.client)
    transport = httpx.ASGITransport(deployed.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://console.example") as other:
        await csrf_of(other)
        form = {"email": deployed.operator_email, "password": PASSWORD, "_csrf_token": theirs}
        assert (await other.post("/login", data=form)).status_code == 403


async def test_a_token_from_before_the_login_or_of_another_session_changes_nothing(deployed: Deployment) -> None:
    client = deployed.client
    anonymous = await csrf_of(client)
    nonce = client.cookies[csrf.COOKIE]
    await log_in(deployed, deployed.operator_email)
    client.cookies.set(csrf.COOKIE, nonce)
    mine = await csrf_of(client, "/tenants")
    transport = httpx.ASGITransport(deployed.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://console.example") as other:
        token = await csrf_of(other)
        form = {"email": deployed.operator_email, "password": PASSWORD, "_csrf_token": token}
        assert (await other.post("/login", data=form)).status_code == 303
        theirs = await csrf_of(other, "/tenants")
    assert len({anonymous, mine, theirs}) == 3
    for token in (anonymous, theirs, nonce):
        answer = await client.post("/tenants/acme/deactivate", data={"_csrf_token": token})
        assert answer.status_code == 403
        assert "load the page again" in answer.text
        assert (await client.post("/tenants/acme/deactivate", headers={"x-csrftoken": token})).status_code == 403
    assert (await client.post("/tenants/acme/deactivate", data={"_csrf_token": mine})).status_code == 303
    assert (await client.post("/tenants/acme/activate", headers={"x-csrftoken": mine})).status_code == 303


async def test_a_login_form_sent_from_another_site_is_refused(deployed: Deployment) -> None:
    token = await csrf_of(deployed.client)
    form = {"email": deployed.operator_email, "password": PASSWORD, "_csrf_token": token}
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 303)):
        answer = await deployed.client.post("/login", data=form, headers={"sec-fetch-site": site})
        assert answer.status_code == status


async def test_only_a_page_with_a_form_sets_the_cookie_and_over_tls_it_is_secure(settings: Settings) -> None:
    tls = msgspec.structs.replace(settings, cookie_secure=True)
    async with deployment(tls, ["tenants", "accounts", "console"]) as deployed:
        (cookie,) = (await deployed.client.get("/login")).headers.get_list("set-cookie")
        assert cookie.startswith(f"{csrf.COOKIE}=")
        for flag in ("Secure", "HttpOnly", "SameSite=lax", "Path=/"):
            assert flag.lower() in cookie.lower()
        for path in ("/static/css/tokens.css", "/healthz", "/tenants"):
            assert "set-cookie" not in (await deployed.client.get(path)).headers


async def test_every_page_and_fragment_keeps_to_the_policy(deployed: Deployment) -> None:
    """No inline script, style or handler, nothing from another host: the policy would block it."""
    await log_in(deployed, deployed.operator_email)
    for path in ("/", "/tenants", "/tenants/acme", "/replicas", "/login", "/nowhere"):
        page = (await deployed.client.get(path, headers={"accept": "text/html"})).text
        assert " style=" not in page, path
        assert " onclick=" not in page, path
        assert "<style" not in page, path
        assert "<script>" not in page, path
        assert 'src="http' not in page, path
        assert 'includeIndicatorStyles":false' in page or path == "/login" or not page, path
