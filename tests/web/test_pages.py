"""Pages and fragments over HTTP, as operator, viewer and stranger, with the real services behind them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from controlplane.db import transaction
from controlplane.errors import NotFoundError
from controlplane.fleet import service as fleet
from controlplane.local.display import DEMO_QUESTION, DEMO_TOKENS
from controlplane.settings import Settings
from controlplane.tenants import principals, projects
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import PrincipalRole, Scope, TenantPatch
from dataplane.protocol import ReplicaState
from tests.controlplane.clients import Deployment, csrf_of
from tests.controlplane.statements import counted_queries
from tests.controlplane.telemetry.reports import report
from tests.factories.rows import PASSWORD, make_key, make_principal, make_tenant

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANT_PAGES = ["/tenants/acme", "/tenants/acme/projects", "/tenants/acme/principals"]
PAGES = ["/", "/?window=3600", "/replicas", "/tenants", *TENANT_PAGES]
FRAGMENTS = {
    "/": "overview",
    "/replicas": "replica-list",
    "/tenants": "tenant-list",
    "/tenants/acme": "keys",
    "/tenants/acme/projects": "project-list",
    "/tenants/acme/principals": "principal-list",
}
HTMX = {"hx-request": "true"}


async def post(deployed: Deployment, path: str, data: Mapping[str, object] | None = None, htmx: bool = False):  # type: ignore[no-untyped-def]
    page = await deployed.client.get("/tenants")
    found = re.search(r'name="_csrf_token"\s+value="([^"]+)"', page.text)
    assert found is not None
    return await deployed.client.post(
        path, data={"_csrf_token": found.group(1), **(data or {})}, headers=HTMX if htmx else {}
    )


@pytest.mark.parametrize("path", PAGES)
async def test_an_operator_gets_a_whole_page(operator: Deployment, path: str) -> None:
    answer = await operator.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.text.lstrip().startswith("<!doctype html>")
    assert 'aria-current="page"' in answer.text
    assert answer.text.count("<h1") == 1


@pytest.mark.parametrize("path", FRAGMENTS)
async def test_htmx_gets_the_fragment_of_the_same_handler(operator: Deployment, path: str) -> None:
    answer = await operator.client.get(path, headers=HTMX)
    assert answer.status_code == 200
    assert "<html" not in answer.text
    assert f'id="{FRAGMENTS[path]}"' in answer.text
    assert answer.headers["vary"] == "HX-Request"
    restored = await operator.client.get(path, headers={**HTMX, "hx-history-restore-request": "true"})
    assert "<!doctype html>" in restored.text


@pytest.mark.parametrize("path", [*PAGES, "/logout", "/tenants/nobody"])
async def test_a_stranger_and_a_tenant_are_sent_to_the_login_page(deployed: Deployment, path: str) -> None:
    answer = await deployed.client.get(path, headers={"accept": "text/html"})
    if path == "/logout":
        assert answer.status_code == 405
        return
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/login")
    tenant = await deployed.client.get(path, headers={"accept": "text/html", **deployed.tenant_member})
    assert tenant.status_code == 303  # a tenant's API key opens nothing here
    fragment = await deployed.client.get(path, headers=HTMX)
    assert fragment.status_code == 401
    assert fragment.headers["hx-redirect"] == "/login"


async def test_a_stranger_and_a_tenants_key_get_no_events(deployed: Deployment) -> None:
    for headers in ({}, deployed.tenant_member, deployed.operator):
        answer = await deployed.client.get("/events/overview", headers={"accept": "text/event-stream", **headers})
        assert answer.status_code == 401


async def test_login_leads_where_the_stranger_wanted_to_go(deployed: Deployment) -> None:
    token = await csrf_of(deployed.client)
    form = {"email": deployed.operator_email, "password": PASSWORD, "_csrf_token": token, "next": "/tenants/acme"}
    answer = await deployed.client.post("/login", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/tenants/acme")
    again = await deployed.client.get("/login?next=/replicas")
    assert (again.status_code, again.headers["location"]) == (303, "/replicas")


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example"])
async def test_login_never_leads_to_another_host(deployed: Deployment, target: str) -> None:
    token = await csrf_of(deployed.client)
    form = {"email": deployed.operator_email, "password": PASSWORD, "_csrf_token": token, "next": target}
    answer = await deployed.client.post("/login", data=form)
    assert answer.headers["location"] == "/"


async def test_a_wrong_password_and_an_unknown_account_read_the_same(deployed: Deployment) -> None:
    token = await csrf_of(deployed.client)
    answers = []
    for email in (deployed.operator_email, "nobody@example.com"):
        form = {"email": email, "password": "not the password", "_csrf_token": token}
        answer = await deployed.client.post("/login", data=form)
        assert answer.status_code == 401
        assert "The email or the password is wrong." in answer.text
        assert "not the password" not in answer.text
        answers.append(answer.text.replace(email, "EMAIL"))
    scrubbed = [re.sub(r'value="[0-9a-f]{96,}"', "", text) for text in answers]
    assert scrubbed[0] == scrubbed[1]


async def test_logging_out_ends_the_session_on_the_server(operator: Deployment) -> None:
    cookies = dict(operator.client.cookies)
    answer = await post(operator, "/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    operator.client.cookies.update(cookies)
    assert (await operator.client.get("/")).status_code == 303


@pytest.mark.parametrize(
    "path",
    ["/login", "/logout", "/tenants", "/tenants/acme/keys", "/tenants/acme/activate", "/tenants/acme/deactivate",
     "/tenants/acme/keys/any/revoke", "/tenants/acme/keys/any/rotate", "/tenants/acme/projects",
     "/tenants/acme/projects/default/deactivate", "/tenants/acme/principals"],
)  # fmt: skip
async def test_a_form_without_its_csrf_token_is_refused(operator: Deployment, path: str) -> None:
    answer = await operator.client.post(path, data={"slug": "evil", "name": "Evil"})
    assert answer.status_code == 403
    assert "<h1" in answer.text
    async with transaction(operator.app.state.resources.engine) as session:
        assert (await tenants.get_tenant(session, "acme")).active
        with pytest.raises(NotFoundError):
            await tenants.get_tenant(session, "evil")


async def test_a_viewer_sees_but_has_no_buttons_and_is_refused(viewer: Deployment) -> None:
    async with transaction(viewer.app.state.resources.engine) as session:
        await make_principal(session, "acme")
        await make_key(session, "acme")
    for path in ("/tenants", *TENANT_PAGES):
        page = (await viewer.client.get(path)).text.replace("js/dialog.js", "")
        assert "acme" in page
        for absent in (
            "New tenant",
            "New key",
            "New pe",
            "New pro",
            "Revoke",
            "Rotate",
            "Set role",
            "activate",
            "dialog",
        ):
            assert absent.lower() not in page.lower(), (path, absent)
    for path, data in (
        ("/tenants", {"slug": "evil", "name": "Evil"}),
        ("/tenants/acme/keys", {"name": "evil"}),
        ("/tenants/acme/deactivate", {}),
        ("/tenants/acme/projects", {"slug": "evil", "name": "Evil"}),
        ("/tenants/acme/principals", {"name": "evil"}),
    ):
        assert (await post(viewer, path, data)).status_code == 403
    assert (await post(viewer, "/logout")).status_code == 303


async def test_creating_a_tenant_and_a_key_whose_text_is_shown_once(operator: Deployment) -> None:
    created = await post(operator, "/tenants", {"slug": "blue", "name": "Blue Ltd", "allowed_models": "a, b"})
    assert (created.status_code, created.headers["location"]) == (303, "/tenants/blue")
    page = await operator.client.get("/tenants/blue")
    assert "Blue Ltd" in page.text
    assert "a, b" in page.text

    answer = await post(operator, "/tenants/blue/keys", {"name": "billing", "allowed_models": ""}, htmx=True)
    assert answer.status_code == 200
    plain = re.search(r"tg_[0-9A-Za-z]{11}_[0-9A-Za-z]{49}", answer.text)
    assert plain is not None
    assert f'-H "Authorization: Bearer {plain.group()}"' in answer.text.replace("&#34;", '"')
    assert operator.settings.public_gateway_url in answer.text
    body = re.search(r"-d '([^']+)'</code>", html.unescape(answer.text))
    assert body is not None
    question = {"role": "user", "content": DEMO_QUESTION}
    assert json.loads(body.group(1)) == {
        "model": "a",
        "temperature": 0,
        "max_tokens": DEMO_TOKENS,
        "messages": [question],
    }
    assert 'id="keys"' in answer.text
    assert 'hx-swap-oob="true"' in answer.text
    assert answer.headers["cache-control"] == "no-store"
    later = await operator.client.get("/tenants/blue")
    assert "billing" in later.text
    assert plain.group() not in later.text


async def test_which_models_may_be_used_and_which_nobody_serves_now(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        await make_tenant(session, "amber", allowed_models=["served", "missing"])
        nothing = (await make_key(session, "amber", allowed_models=[])).view
        absent = (await make_key(session, "amber", allowed_models=["missing"])).view
        present = (await make_key(session, "amber", allowed_models=["served"])).view
        await fleet.ensure_pool(session, "some", "served")
        await fleet.take_in(session, [report("one", pool="some", model="served")], 0.0)
        await fleet.ensure_pool(session, "idle", "missing")
        await fleet.take_in(session, [report("two", pool="idle", state=ReplicaState.FAILED)], 0.0)
    page = (await operator.client.get("/tenants/amber")).text
    cells = {
        key_id: " ".join(re.sub(r"<[^>]+>", " ", cell).split())
        for key_id, cell in re.findall(r'<tr id="key-(\w+)">.*?<td class="wrap"[^>]*>(.*?)</td>', page, re.DOTALL)
    }
    assert cells == {
        nothing.key_id: "none",
        absent.key_id: "missing served by no replica now",
        present.key_id: "served",
    }
    facts = " ".join(re.sub(r"<[^>]+>", " ", page.split("New key")[0]).split())
    assert "served, missing served by no replica now: missing" in facts
    await post(operator, "/tenants", {"slug": "mute", "name": "Mute"})
    async with transaction(operator.app.state.resources.engine) as session:
        await tenants.change_tenant(session, "mute", TenantPatch(allowed_models=[]))
    listing = (await operator.client.get("/tenants")).text
    row = listing.split('href="/tenants/mute"')[1].split("</tr>")[0]
    assert re.search(r'data-label="Allowed models">\s*none\s*</td>', row)


async def test_a_form_sent_twice_creates_once(operator: Deployment) -> None:
    twice = {"name": "billing", "allowed_models": "", "idempotency_key": "one-click"}
    assert (await post(operator, "/tenants/acme/keys", twice)).status_code == 200
    second = await post(operator, "/tenants/acme/keys", twice)
    assert second.status_code == 422
    assert "already made the key" in second.text
    same = {"slug": "green", "name": "Green", "idempotency_key": "one-click"}
    assert (await post(operator, "/tenants", same)).status_code == 303
    assert (await post(operator, "/tenants", same)).headers["location"] == "/tenants/green"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"slug": "No Spaces", "name": "X"}, "Slug must be 1 to 40 lower-case letters"),
        ({"slug": "acme", "name": "X"}, "A tenant with the slug acme exists already."),
        ({"slug": "fine", "name": " "}, "Name must have 1 to 200 printable characters."),
    ],
)
@pytest.mark.parametrize("htmx", [True, False])
async def test_a_refused_form_comes_back_with_the_reason_at_its_field(
    operator: Deployment, form: dict[str, str], message: str, htmx: bool
) -> None:
    answer = await post(operator, "/tenants", form, htmx=htmx)
    assert answer.status_code == 422
    assert message in answer.text
    assert 'aria-invalid="true"' in answer.text
    assert f'value="{form["slug"]}"' in answer.text
    assert ("<!doctype html>" in answer.text) is not htmx


async def test_revoking_a_key_needs_the_tenant_it_belongs_to(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        await make_tenant(session, "other")
        key = (await make_key(session, "acme")).view
    wrong = await post(operator, f"/tenants/other/keys/{key.key_id}/revoke", htmx=True)
    assert wrong.status_code == 404
    right = await post(operator, f"/tenants/acme/keys/{key.key_id}/revoke", htmx=True)
    assert right.status_code == 200
    row = re.search(rf'<tr id="key-{key.key_id}">.*?</tr>', right.text, re.DOTALL)
    assert row is not None
    assert "Revoked" in row.group()
    assert "<button" not in row.group()
    assert 'class="toast"' in right.text


async def test_f10_rotating_shows_the_new_key_once_and_a_repeat_makes_no_second(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        await make_tenant(session, "turning")
        key = (await make_key(session, "turning", scopes=[Scope.USAGE_READ])).view
    path, form = f"/tenants/turning/keys/{key.key_id}/rotate", {"grace_s": "3600", "idempotency_key": "one-click"}
    assert (await post(operator, f"/tenants/acme/keys/{key.key_id}/rotate", form)).status_code == 404
    for wrong in ("", "soon", "-1", "9" * 9, "9" * 20):
        assert (await post(operator, path, {**form, "grace_s": wrong})).status_code == 400
    answer = await post(operator, path, form, htmx=True)
    assert answer.status_code == 200
    plain = re.search(r"tg_[0-9A-Za-z]{11}_[0-9A-Za-z]{49}", answer.text)
    assert plain is not None
    assert "The key it replaces stays valid until" in answer.text
    assert "curl" not in answer.text  # it may not send requests
    assert "Replaced" in answer.text.split('id="keys"')[1]
    assert (await post(operator, path, form, htmx=True)).status_code == 409
    page = await operator.client.get("/tenants/turning")
    assert plain.group() not in page.text
    assert page.text.count('<tr id="key-') == 2


async def test_a_key_is_made_for_a_project_and_an_owner_within_their_role(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        await make_tenant(session, "orange")
        owner = await make_principal(session, "orange", role=PrincipalRole.VIEWER)
    assert (await post(operator, "/tenants/orange/projects", {"slug": "search", "name": "Search"})).status_code == 303
    form = {"name": "k", "project": "search", "principal_id": str(owner.id), "expires_at": "2999-01-01"}
    for wrong, said in (
        ({"scopes": "inference"}, "A key of a viewer may not have inference."),
        ({"scopes": "everything"}, "There is no scope &#39;everything&#39;."),
        ({"project": "none"}, "The tenant orange has no project none."),
        ({"principal_id": "me"}, "The owner is not one of the list."),
        ({"expires_at": "tomorrow"}, "The day must be written as YYYY-MM-DD."),
        ({"expires_at": "2001-01-01"}, "Expires_at lies in the past."),
    ):
        refused = await post(operator, "/tenants/orange/keys", {**form, **wrong}, htmx=True)
        assert (refused.status_code, said in refused.text) == (422, True), (wrong, refused.text)
        assert f'<option value="{owner.id}" selected>' in refused.text or "principal_id" in wrong
    assert (
        await post(operator, "/tenants/orange/keys", {**form, "scopes": ["quota:read", "usage:read"]})
    ).status_code == 200
    async with transaction(operator.app.state.resources.engine) as session:
        (key,) = (await tenants.list_keys(session, "orange")).items
    assert (key.project, key.principal_id, key.scopes) == ("search", owner.id, [Scope.QUOTA_READ, Scope.USAGE_READ])
    assert key.expires_at == datetime(2999, 1, 1, tzinfo=UTC)


async def test_projects_and_owners_are_made_and_changed_on_their_pages(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        await make_tenant(session, "lime")
    project = {"slug": "search", "name": "Search", "idempotency_key": "once"}
    owner = {"name": "Ada", "email": "ada@example.com", "role": "admin", "idempotency_key": "once"}
    for path, form in (("/tenants/lime/projects", project), ("/tenants/lime/principals", owner)):
        for _ in range(2):
            made = await post(operator, path, form)
            assert (made.status_code, made.headers["location"]) == (303, path)
        taken = await post(operator, path, {**form, "idempotency_key": "other"}, htmx=True)
        assert taken.status_code == 422
        assert "already" in taken.text
        assert 'aria-invalid="true"' in taken.text
    assert (await post(operator, "/tenants/lime/principals", {"name": "Bob", "role": "king"})).status_code == 422
    async with transaction(operator.app.state.resources.engine) as session:
        (ada,) = (await principals.list_principals(session, "lime")).items
    for action, form in (("role", {"role": "viewer"}), ("deactivate", {})):
        done = await post(operator, f"/tenants/lime/principals/{ada.id}/{action}", form)
        assert done.headers["location"] == "/tenants/lime/principals"
        elsewhere = await post(operator, f"/tenants/acme/principals/{ada.id}/{action}", form)
        assert elsewhere.status_code == 404
    for action, status in (("deactivate", 303), ("activate", 303)):
        assert (await post(operator, f"/tenants/lime/projects/search/{action}")).status_code == status
    assert (await post(operator, "/tenants/lime/projects/default/deactivate")).status_code == 409
    async with transaction(operator.app.state.resources.engine) as session:
        (ada,) = (await principals.list_principals(session, "lime")).items
        assert (ada.role, ada.active) == (PrincipalRole.VIEWER, False)
        assert (await projects.get_project(session, "lime", "search")).active


async def test_lists_of_projects_and_owners_are_paged_and_cost_few_queries(operator: Deployment) -> None:
    engine = operator.app.state.resources.engine
    async with transaction(engine) as session:
        await make_tenant(session, "crowd")
        for number in range(60):
            await projects.create_project(session, "crowd", slug=f"p{number}", name="P")
            await make_principal(session, "crowd")
    for path, rows in (("/tenants/crowd/projects", 61), ("/tenants/crowd/principals", 60)):
        with counted_queries(engine) as statements:
            first = await operator.client.get(path)
        assert len(statements) <= 5, statements
        assert first.text.count('<th scope="row">') == 50
        following = re.search(rf'href="({path}\?after=[^"]+)"', first.text)
        assert following is not None
        second = await operator.client.get(following.group(1), headers=HTMX)
        assert second.text.count('<th scope="row">') == rows - 50


async def test_deactivating_and_activating_a_tenant(operator: Deployment) -> None:
    for path, word in (("deactivate", "Inactive"), ("activate", "Active")):
        answer = await post(operator, f"/tenants/acme/{path}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/tenants/acme")
        assert f"</svg>\n{word}</span>" in (await operator.client.get("/tenants/acme")).text


async def test_tenants_are_paged_by_key_and_cost_at_most_three_queries(operator: Deployment) -> None:
    engine = operator.app.state.resources.engine
    async with transaction(engine) as session:
        for _ in range(100):
            await make_tenant(session)
    with counted_queries(engine) as statements:
        first = await operator.client.get("/tenants")
    assert 2 <= len(statements) <= 3, statements
    assert first.text.count('<th scope="row">') == 50
    following = re.search(r'href="(/tenants\?after=[^"]+)"', first.text)
    assert following is not None
    with counted_queries(engine) as statements:
        second = await operator.client.get(following.group(1), headers=HTMX)
    assert len(statements) <= 3, statements
    assert second.text.count('<th scope="row">') == 50
    slugs = re.findall(r'href="/tenants/([a-z0-9-]+)"', first.text + second.text)
    assert len(slugs) == len(set(slugs)) == 100


async def test_live_pages_cost_few_queries(operator: Deployment) -> None:
    engine = operator.app.state.resources.engine
    for path in ("/?window=900", "/replicas"):
        with counted_queries(engine) as statements:
            await operator.client.get(path)
        assert len(statements) <= 5, statements
    with counted_queries(engine) as statements:
        await operator.client.get("/?window=900")  # the snapshot of a moment ago is shared
    assert len(statements) <= 1, statements


async def test_errors_are_pages_for_people_and_json_for_programs(operator: Deployment) -> None:
    missing = await operator.client.get("/tenants/nobody")
    assert missing.status_code == 404
    assert "There is no tenant nobody." in missing.text
    assert "Back to the Overview" in missing.text
    assert (await operator.client.get("/nowhere")).status_code == 404
    bad = await operator.client.get("/events/overview?window=7")
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "window"
    assert (await operator.client.get("/tenants?after=nonsense")).status_code == 400


async def test_every_answer_forbids_foreign_and_inline_code(operator: Deployment) -> None:
    for path in [*PAGES, "/login", "/nowhere", "/tenants/nobody"]:
        answer = await operator.client.get(path)
        policy = answer.headers["content-security-policy"]
        for directive in (
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "frame-ancestors 'none'",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'self'",
        ):
            assert directive in policy
        assert "unsafe" not in policy
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", answer.text), path


async def test_static_files_are_open_cached_and_confined(deployed: Deployment) -> None:
    page = await deployed.client.get("/login")
    for address in re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text):
        answer = await deployed.client.get(address)
        assert answer.status_code == 200, address
        assert "immutable" in answer.headers["cache-control"]
    for path in ("/static/../templates/errors.html", "/static/%2e%2e/templates/errors.html", "/static/none.js"):
        assert (await deployed.client.get(path)).status_code == 404


async def test_postgres_away_is_a_page_not_a_traceback(offline_settings: Settings) -> None:
    import httpx

    from controlplane.app import Role, create_app

    app = create_app(Role.CONTROL, offline_settings)
    app.state.passwords.close()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://console.example") as client:
        client.cookies.set("tidegate_session", "x" * 43)
        answer = await client.get("/", headers={"accept": "text/html"})
    assert answer.status_code == 503
    assert "Traceback" not in answer.text
    await app.state.resources.engine.dispose()
    await app.state.resources.redis.aclose()
