"""What the page after a change says, once and to nobody else, over HTTP with the real services behind it."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie

import httpx
import pytest

from controlplane.console.flash import KEPT_S
from controlplane.db import transaction
from controlplane.quotas import price_service, request_service, service
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import QuotaRequestSpec, QuotaSpec, QuotaView
from controlplane.slo import service as slos
from controlplane.tenants import principals
from controlplane.tenants import service as tenants
from tests.conftest import make_settings
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in
from tests.factories.rows import make_key, make_principal, make_tenant
from tests.services import Databases

pytestmark = pytest.mark.asyncio(loop_scope="module")

COOKIE = "tidegate_flash"
HTMX = {"hx-request": "true"}
SOON = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(days=1)
FORM_TIME, SHOWN_TIME = f"{SOON:%Y-%m-%dT%H:%M}", f"{SOON:%Y-%m-%d %H:%M} UTC"


async def send(
    deployed: Deployment, path: str, form: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """A form from the page of somebody logged in; what waited before is shown to nobody."""
    token = await csrf_of(deployed.client, "/tenants")
    form = {"_csrf_token": token, **(form or {})}
    return await deployed.client.post(path, data=form, headers=headers, follow_redirects=False)


def toasts(page: httpx.Response) -> list[str]:
    """The words of each toast: title, then text."""
    found = re.findall(r'<div class="toast" role="status".*?<h2>(.*?)</h2>(?:<p>(.*?)</p>)?', page.text, re.DOTALL)
    return [html.unescape(" ".join(part for part in parts if part)) for parts in found]


async def told(deployed: Deployment, path: str, form: dict[str, str] | None = None) -> str:
    """What the page after the change says; it says nothing when it is loaded again."""
    answer = await send(deployed, path, form)
    assert answer.status_code == 303, answer.text
    page = await deployed.client.get(answer.headers["location"])
    assert page.status_code == 200, page.text
    again = await deployed.client.get(answer.headers["location"])
    assert toasts(again) == []
    (words,) = toasts(page)
    return words


async def limited(deployed: Deployment, hard: int = 1000) -> QuotaView:
    """A limit of a tenant of its own."""
    async with transaction(deployed.app.state.resources.engine) as session:
        tenant = await make_tenant(session)
        spec = QuotaSpec(kind=QuotaKind.TOKENS_PER_DAY, hard=hard)
        return await service.create_quota(session, tenant.slug, spec)


async def a_tenant(deployed: Deployment) -> str:
    async with transaction(deployed.app.state.resources.engine) as session:
        return (await make_tenant(session)).slug


async def test_changes_of_a_tenant_and_its_projects_are_told_once(operator: Deployment) -> None:
    evil = {"slug": "evil", "name": "Evil <b>&amp; Sons</b>"}
    assert await told(operator, "/tenants", evil) == "Tenant created: Evil <b>&amp; Sons</b>"
    assert await told(operator, "/tenants", {"slug": "good", "name": "Good"}) == "Tenant created: Good"
    off = "Tenant deactivated: Good Gateways refuse all its keys within two seconds."
    assert await told(operator, "/tenants/good/deactivate") == off
    assert await told(operator, "/tenants/good/activate") == "Tenant activated: Good"
    form = {"name": "Better", "active": "active", "priority": "7", "time_zone": "UTC", "weight": "1"}
    form |= {"floor_tokens_per_s": "0"}
    assert await told(operator, "/tenants/good/change", form) == "Tenant changed: Better Name, priority."
    assert await told(operator, "/tenants/good/change", form) == "Nothing was changed"
    here = "/tenants/good/projects"
    search = {"slug": "search", "name": "Search"}
    assert await told(operator, here, search) == "Project created: Search of good"
    off = "Project deactivated: Search of good Gateways refuse all its keys within two seconds."
    assert await told(operator, f"{here}/search/deactivate") == off
    assert await told(operator, f"{here}/search/activate") == "Project activated: Search of good"
    form = {"name": "Find", "active": "active", "allowed_models": "m"}
    assert await told(operator, f"{here}/search/change", form) == "Project changed: Find Name, allowed models."


async def test_changes_of_principals_and_a_key_revoked_without_scripts_are_told_once(operator: Deployment) -> None:
    slug = await a_tenant(operator)
    here = f"/tenants/{slug}/principals"
    ada = {"name": "Ada", "email": "ada@example.com", "role": "member"}
    assert await told(operator, here, ada) == f"Person created: Ada of {slug}"
    assert await told(operator, here, {"name": "bot"}) == f"Service account created: bot of {slug}"
    async with transaction(operator.app.state.resources.engine) as session:
        owners = (await principals.list_principals(session, slug)).items
        owner = next(each for each in owners if each.name == "Ada")
        key = (await make_key(session, slug)).view
    role = await told(operator, f"{here}/{owner.id}/role", {"role": "viewer"})
    assert role == f"Role set: Ada of {slug} is viewer"
    off = await told(operator, f"{here}/{owner.id}/deactivate")
    assert off == f"Person deactivated: Ada of {slug} Gateways refuse all its keys within two seconds."
    assert await told(operator, f"{here}/{owner.id}/activate") == f"Person activated: Ada of {slug}"
    revoked = await told(operator, f"/tenants/{slug}/keys/{key.key_id}/revoke")
    assert revoked == f"Revoked “{key.name}” Gateways refuse it within two seconds."


async def test_changes_of_limits_are_told_once(operator: Deployment) -> None:
    quota = await limited(operator)
    slug, here = quota.tenant, f"/quotas/{quota.id}"
    form = {"kind": "requests_per_minute", "hard": "100", "away": "closed"}
    assert await told(operator, f"/tenants/{slug}/quotas", form) == f"Limit set: 100 requests a minute for {slug}"
    form |= {"soft": "1", "hard": "2,000", "project": "default", "model": "m<1>"}
    words = f"Limit set: 2,000 requests a minute for project default of {slug}, model m<1>"
    assert await told(operator, f"/tenants/{slug}/quotas", form) == f"{words} A warning above 1 request a minute."
    words = f"Limit changed: a warning above 50 tokens a day for {slug}"
    assert await told(operator, here, {"soft": "50", "away": "open"}) == words
    raised = {"amount": "5", "expires_at": FORM_TIME, "reason": "launch"}
    words = f"Limit raised: 5 tokens a day more for {slug} Until {SHOWN_TIME}."
    await told(operator, here, {"hard": "70", "away": "closed"})
    assert await told(operator, f"{here}/grants", raised) == words
    page = (await operator.client.get(here)).text
    end = re.search(rf'action="({here}/grants/[^"]+/end)"', page)
    assert end
    assert await told(operator, end[1]) == f"Raise ended: 5 tokens a day more for {slug}"
    assert await told(operator, f"{here}/delete") == f"Limit removed: 70 tokens a day for {slug}"


async def test_decisions_on_requests_for_more_are_told_once(operator: Deployment) -> None:
    quota = await limited(operator)
    async with transaction(operator.app.state.resources.engine) as session:
        ids = [
            (
                await request_service.ask(
                    session, quota.tenant, QuotaRequestSpec(amount=amount, reason="x", quota_id=quota.id), by="k"
                )
            ).id
            for amount in (1, 2, 3, 4)
        ]
    more, slug = "tokens a day more for", quota.tenant
    approved = await told(operator, f"/quota-requests/{ids[0]}/approve")
    assert approved == f"Request approved: 1 token a day more for {slug} For good."
    assert await told(operator, f"/quota-requests/{ids[1]}/decline") == f"Request declined: 2 {more} {slug}"
    given = {"decision": "approve", "amount": "30", "until": FORM_TIME}
    words = f"Request approved: 30 {more} {slug} Until {SHOWN_TIME}."
    assert await told(operator, f"/quota-requests/{ids[2]}", given) == words
    declined = await told(operator, f"/quota-requests/{ids[3]}", {"decision": "decline"})
    assert declined == f"Request declined: 4 {more} {slug}"


async def test_prices_and_objectives_are_told_once(operator: Deployment) -> None:
    form = {"pool": "gpu-a", "uncached_input": "2", "cached_input": "1", "output": "8"}
    assert await told(operator, "/prices", form) == "Price set: gpu-a It applies from now on."
    planned = await told(operator, "/prices", {**form, "valid_from": FORM_TIME})
    assert planned == f"Price set: gpu-a It applies from {SHOWN_TIME}."
    async with transaction(operator.app.state.resources.engine) as session:
        price = (await price_service.list_prices(session, pool="gpu-a")).items[0]
    taken = await told(operator, f"/prices/{price.id}/take-back")
    assert taken == "Price taken back: gpu-a The one before goes on in its place."
    other = await told(operator, "/prices", {**form, "pool": ""})
    assert other == "Price set: every other pool It applies from now on."
    form = {"tenant": "acme", "pool": "p", "service_class": "fast", "ttft_ms": "500", "ttft_share": "95"}
    form |= {"availability": "99.9"}
    words = "Objectives set: acme, pool p, class fast TTFT ≤ 500 ms for 95 %, available for 99.9 %."
    assert await told(operator, "/slos", form) == words
    async with transaction(operator.app.state.resources.engine) as session:
        slo = (await slos.list_slos(session, tenant="acme")).items[0]
    for action, done in (("disable", "disabled"), ("enable", "enabled"), ("delete", "removed")):
        words = f"Objectives {done}: acme, pool p, class fast"
        assert await told(operator, f"/slos/{slo.id}/{action}") == words


async def test_roll_backs_the_prompt_log_and_canaries_are_told_once(operator: Deployment) -> None:
    quota = await limited(operator)
    await told(operator, f"/quotas/{quota.id}", {"hard": "5", "away": "closed"})
    newest = re.search(r'<tr id="change-(\d+)">', (await operator.client.get("/policy")).text)
    assert newest
    words = await told(operator, f"/policy/changes/{newest[1]}/rollback")
    assert words == f"Change {newest[1]} rolled back: Limit of {quota.tenant} By change {int(newest[1]) + 1}."
    here = f"/tenants/{quota.tenant}/prompts"
    on = await told(operator, here, {"retention_days": "1", "sample": "12.5"})
    assert on == f"Prompt log on: {quota.tenant} Kept for 1 day, 12.5 % of requests."
    assert await told(operator, f"{here}/off") == f"Prompt log off: {quota.tenant} All that was kept is deleted."
    assert (await told(operator, "/canaries/run")).startswith("Canaries asked to run")


async def test_htmx_goes_to_a_page_that_tells_it_and_fragments_meanwhile_leave_it_alone(operator: Deployment) -> None:
    quota = await limited(operator)
    answer = await send(operator, f"/quotas/{quota.id}", {"hard": "7", "away": "closed"}, HTMX)
    assert (answer.status_code, answer.text) == (200, "")
    for polled in ("/quota-requests/waiting", "/replicas", "/tenants"):
        fragment = await operator.client.get(polled, headers=HTMX)
        assert "Limit changed" not in fragment.text
    page = await operator.client.get(answer.headers["hx-redirect"])
    assert toasts(page) == [f"Limit changed: 7 tokens a day for {quota.tenant}"]
    assert COOKIE not in operator.client.cookies


async def test_a_key_revoked_by_htmx_is_told_in_the_fragment_and_not_again(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        key = (await make_key(session, "acme")).view
    answer = await send(operator, f"/tenants/acme/keys/{key.key_id}/revoke", headers=HTMX)
    assert toasts(answer) == [f"Revoked “{key.name}” Gateways refuse it within two seconds."]
    assert 'hx-swap-oob="beforeend:#toaster"' in answer.text
    assert toasts(await operator.client.get("/tenants/acme")) == []


async def test_a_refused_form_tells_nothing_was_done(operator: Deployment) -> None:
    quota = await limited(operator)
    async with transaction(operator.app.state.resources.engine) as session:
        owner = await make_principal(session, quota.tenant)
    for path, form in (
        ("/tenants", {"slug": "Not One", "name": "X"}),
        (f"/tenants/{quota.tenant}/change", {"weight": "heavy"}),
        (f"/tenants/{quota.tenant}/projects", {"slug": "default", "name": "X"}),
        (f"/tenants/{quota.tenant}/projects/default/deactivate", {}),
        (f"/tenants/{quota.tenant}/principals", {"name": ""}),
        (f"/tenants/{quota.tenant}/principals/{owner.id}/role", {"role": "king"}),
        (f"/tenants/{quota.tenant}/quotas", {"kind": "nothing"}),
        (f"/tenants/{quota.tenant}/prompts", {"retention_days": "99"}),
        (f"/quotas/{quota.id}", {"hard": "many", "away": "closed"}),
        (f"/quotas/{quota.id}/grants", {"amount": ""}),
        ("/prices", {"output": ""}),
        ("/slos", {"tenant": "nobody"}),
        ("/policy/changes/999999/rollback", {}),
    ):
        for headers in ({}, HTMX):
            answer = await send(operator, path, form, headers)
            assert answer.status_code in {400, 404, 409, 422}, (path, answer.status_code)
            assert toasts(answer) == []
            assert COOKIE not in operator.client.cookies, path


async def test_a_form_shown_again_does_not_tell_what_was_done_before(operator: Deployment) -> None:
    quota = await limited(operator)
    token = await csrf_of(operator.client, "/tenants")
    form = {"_csrf_token": token, "hard": "9", "away": "closed"}
    done = await operator.client.post(f"/quotas/{quota.id}", data=form, follow_redirects=False)
    assert done.status_code == 303
    refused = await operator.client.post(f"/quotas/{quota.id}", data={**form, "hard": "many"}, follow_redirects=False)
    assert refused.status_code == 422
    assert toasts(refused) == []


async def test_words_are_shown_to_no_other_session(operator: Deployment) -> None:
    quota = await limited(operator)
    await send(operator, f"/quotas/{quota.id}", {"hard": "7", "away": "closed"})
    waiting = operator.client.cookies[COOKIE]
    operator.client.cookies.clear()
    for email in (operator.viewer_email, operator.operator_email):  # of another user, and of a later login
        await log_in(operator, email)
        operator.client.cookies.set(COOKIE, waiting, domain="console.example", path="/")
        page = await operator.client.get("/quotas")
        assert (page.status_code, toasts(page)) == (200, [])
        assert COOKIE not in operator.client.cookies
        operator.client.cookies.clear()


async def test_forged_words_are_not_shown_and_do_not_stay(operator: Deployment) -> None:
    quota = await limited(operator)
    await send(operator, f"/quotas/{quota.id}", {"hard": "7", "away": "closed"})
    payload, _, signature = operator.client.cookies[COOKIE].partition(".")
    other = "eyJ0aXRsZSI6IlBhaWQifQ=="  # {"title":"Paid"}
    for forged in (
        other,
        f"{other}.",
        f"{other}.{signature}",
        f"{payload}.{'0' * len(signature)}",
        f"{payload}.{signature.upper()}",
        f"{payload[:-4]}.{signature}",
        "Paid",
        ".",
        "",
        '"\\303\\244"',
        "x" * 4000,
    ):
        operator.client.cookies.delete(COOKIE)
        operator.client.cookies.set(COOKIE, forged, domain="console.example", path="/")
        page = await operator.client.get("/quotas")
        assert (page.status_code, toasts(page)) == (200, []), forged
        assert COOKIE not in operator.client.cookies, forged


async def test_an_address_puts_no_words_on_a_page(operator: Deployment) -> None:
    for query in ("flash=Paid", "title=Paid", f"{COOKIE}=eyJ0aXRsZSI6IlBhaWQifQ==", "toast=Paid&text=Paid"):
        page = await operator.client.get(f"/quotas?{query}")
        assert toasts(page) == []
        assert "Paid" not in page.text


async def test_markup_in_a_name_is_text(operator: Deployment) -> None:
    answer = await send(operator, "/tenants", {"slug": "markup", "name": "<script>alert(1)</script>"})
    page = await operator.client.get(answer.headers["location"])
    assert toasts(page) == ["Tenant created: <script>alert(1)</script>"]
    assert "<script>alert" not in page.text


async def test_the_longest_words_fit_into_the_cookie_that_a_browser_takes(operator: Deployment) -> None:
    slug, name = "w" * 40, "\U0001f30a" * 200
    answer = await send(operator, "/tenants", {"slug": slug, "name": name})
    assert len(answer.headers["set-cookie"].encode()) < 4096
    page = await operator.client.get(answer.headers["location"])
    assert toasts(page) == [f"Tenant created: {name[:60]}…"]
    form = {"kind": "uncached_input_tokens_per_minute", "hard": "1" * 15, "soft": "1" * 15, "away": "closed"}
    form |= {"project": "default", "model": name}
    answer = await send(operator, f"/tenants/{slug}/quotas", form)
    assert answer.status_code == 303
    assert len(answer.headers["set-cookie"].encode()) < 4096
    (words,) = toasts(await operator.client.get(answer.headers["location"]))
    assert slug in words


async def test_the_cookie_is_for_this_host_alone_short_lived_and_closed_to_scripts(operator: Deployment) -> None:
    quota = await limited(operator)
    answer = await send(operator, f"/quotas/{quota.id}", {"hard": "7", "away": "closed"})
    cookie = SimpleCookie(answer.headers["set-cookie"])[COOKIE]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "lax", "/")
    assert (cookie["max-age"], cookie["domain"], cookie["secure"]) == (str(KEPT_S), "", "")


async def test_with_tls_the_browser_takes_the_cookie_from_this_host_alone(
    postgres: Databases, migrated_template: str, valkey: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = postgres.create("flashtls", template=migrated_template)
    home = tmp_path_factory.mktemp("home")
    async with deployment(make_settings(home, database_url=url, redis_url=valkey, cookie_secure=True)) as running:
        running.client.base_url = httpx.URL("https://console.example")
        await log_in(running, running.operator_email)
        answer = await send(running, "/tenants", {"slug": "tls", "name": "TLS"})
        assert re.search(r"^__Host-tidegate_flash=.*; Secure", answer.headers["set-cookie"])
        assert toasts(await running.client.get(answer.headers["location"])) == ["Tenant created: TLS"]
        assert toasts(await running.client.get(answer.headers["location"])) == []
        async with transaction(running.app.state.resources.engine) as session:
            assert (await tenants.get_tenant(session, "tls")).active
    postgres.drop(url)
