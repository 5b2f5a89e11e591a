"""The admin API of tenants and keys, as an operator uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx
import pytest

from controlplane.settings import Settings
from controlplane.tenants import keys
from tests.controlplane.clients import Deployment, deployment


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "accounts"]) as running:
        running.client.headers.update(running.operator)
        yield running


def body(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_tenant_is_created_shown_listed_changed_and_put_to_sleep(deployed: Deployment) -> None:
    api = deployed.client
    made = body(await api.post("/api/v1/tenants", json={"slug": "globex", "name": "Globex", "priority": 2}), 201)
    assert made["active"] is True
    assert "cache_salt" not in made
    assert body(await api.get("/api/v1/tenants/globex")) == made
    assert [t["slug"] for t in body(await api.get("/api/v1/tenants"))["items"]] == ["acme", "globex"]
    changed = body(await api.patch("/api/v1/tenants/globex", json={"name": "New", "allowed_models": ["m"]}))
    assert (changed["name"], changed["allowed_models"], changed["priority"]) == ("New", ["m"], 2)
    assert body(await api.patch("/api/v1/tenants/globex", json={"allowed_models": None}))["allowed_models"] is None
    assert body(await api.patch("/api/v1/tenants/globex", json={"active": False}))["active"] is False


async def test_a_key_is_shown_once_and_never_again(deployed: Deployment) -> None:
    api = deployed.client
    made = body(await api.post("/api/v1/tenants/acme/keys", json={"name": "ci"}), 201)
    assert keys.parse(made["key"]).key_id == made["view"]["key_id"]
    secret = made["key"].split("_")[2][:40]
    for path in ("/api/v1/tenants/acme/keys", f"/api/v1/keys/{made['view']['key_id']}", "/api/v1/tenants/acme"):
        assert secret not in (await api.get(path)).text
    gone = body(await api.delete(f"/api/v1/keys/{made['view']['key_id']}"))
    assert gone["revoked_at"]
    assert body(await api.delete(f"/api/v1/keys/{made['view']['key_id']}")) == gone


async def test_lists_come_in_pages(deployed: Deployment) -> None:
    api = deployed.client
    for number in range(4):
        body(await api.post("/api/v1/tenants/acme/keys", json={"name": f"k{number}"}), 201)
    seen, after = [], None
    for _ in range(10):
        page = body(
            await api.get("/api/v1/tenants/acme/keys", params={"limit": 2, **({"after": after} if after else {})})
        )
        seen += [key["name"] for key in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert len(seen) == 5
    assert seen[1:] == ["k0", "k1", "k2", "k3"]


async def test_f10_a_repeated_creation_makes_one(deployed: Deployment) -> None:
    api = deployed.client
    again = {"idempotency-key": "once"}
    tenant = {"slug": "globex", "name": "Globex"}
    first = body(await api.post("/api/v1/tenants", json=tenant, headers=again), 201)
    assert body(await api.post("/api/v1/tenants", json=tenant, headers=again), 201) == first
    made = body(await api.post("/api/v1/tenants/acme/keys", json={"name": "ci"}, headers=again), 201)
    repeated = body(await api.post("/api/v1/tenants/acme/keys", json={"name": "ci"}, headers=again), 409)
    assert made["view"]["key_id"] in repeated["error"]["message"]


@pytest.mark.parametrize(
    ("path", "sent", "changed"),
    [
        ("/tenants", {"slug": "globex", "name": "Globex"}, {"slug": "other", "name": "Other", "weight": 2.0}),
        ("/tenants/acme/projects", {"slug": "search", "name": "Search"}, {"name": "Other", "metadata": {"team": "b"}}),
        (
            "/tenants/acme/principals",
            {"kind": "person", "name": "Ada", "email": "ada@example.com", "role": "member"},
            {"email": "bob@example.com", "role": "admin"},
        ),
    ],
)
async def test_f10_a_repeat_that_asks_for_something_else_is_refused_by_name(
    deployed: Deployment, path: str, sent: dict[str, object], changed: dict[str, object]
) -> None:
    once = {"idempotency-key": "once"}
    made = body(await deployed.client.post(f"/api/v1{path}", json=sent, headers=once), 201)
    for param, value in changed.items():
        error = body(await deployed.client.post(f"/api/v1{path}", json={**sent, param: value}, headers=once), 409)
        assert (error["error"]["code"], error["error"]["param"]) == ("idempotency_mismatch", param)
    assert body(await deployed.client.post(f"/api/v1{path}", json=sent, headers=once), 201) == made


async def test_projects_and_principals_are_created_shown_listed_and_changed(deployed: Deployment) -> None:
    api, once = deployed.client, {"idempotency-key": "once"}
    bodies = {
        "projects": {"slug": "search", "name": "Search", "metadata": {"team": "core"}},
        "principals": {"kind": "person", "name": "Ada", "email": "ada@example.com", "role": "member"},
    }
    changes: dict[str, dict[str, object]] = {"projects": {"active": False}, "principals": {"role": "viewer"}}
    for noun, sent in bodies.items():
        made = body(await api.post(f"/api/v1/tenants/acme/{noun}", json=sent, headers=once), 201)
        assert made.items() >= {**sent, "tenant": "acme", "active": True}.items()
        assert body(await api.post(f"/api/v1/tenants/acme/{noun}", json=sent, headers=once), 201) == made
        path = f"/api/v1/tenants/acme/{noun}/{made['slug'] if noun == 'projects' else made['id']}"
        assert body(await api.get(path)) == made
        assert made in body(await api.get(f"/api/v1/tenants/acme/{noun}"))["items"]
        assert body(await api.patch(path, json=changes[noun])).items() >= changes[noun].items()
        again = body(await api.post(f"/api/v1/tenants/acme/{noun}", json=sent), 409)["error"]
        assert again["code"] in {"slug_taken", "name_taken"}


async def test_f10_a_rotation_answers_the_new_key_once(deployed: Deployment) -> None:
    api, once = deployed.client, {"idempotency-key": "rotate"}
    sent = {"name": "ci", "scopes": ["usage:read"], "metadata": {"a": "b"}, "expires_at": "2999-01-01T00:00:00Z"}
    old = body(await api.post("/api/v1/tenants/acme/keys", json=sent), 201)["view"]
    assert old.items() >= {**sent, "project": "default", "principal": None, "rotated_to": None}.items()
    path = f"/api/v1/keys/{old['key_id']}/rotate"
    made = body(await api.post(path, json={}, headers=once), 201)
    assert keys.parse(made["key"]).key_id == made["view"]["key_id"]
    assert made["view"]["identity"] == old["identity"] == old["key_id"]
    repeated = body(await api.post(path, json={}, headers=once), 409)["error"]
    assert repeated["code"] == "idempotency_repeated"
    assert made["view"]["key_id"] in repeated["message"]
    assert body(await api.post(path, json={"grace_s": 0}), 409)["error"]["code"] == "key_rotated"


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "code", "param"),
    [
        ("GET", "/tenants/acme/projects/none", None, 404, "project_not_found", "project"),
        ("GET", "/tenants/nobody/projects", None, 404, "tenant_not_found", "slug"),
        ("GET", "/tenants/nobody/principals", None, 404, "tenant_not_found", "slug"),
        ("GET", "/tenants/acme/projects?after=x", None, 400, "invalid_request", "after"),
        ("GET", "/tenants/acme/principals?limit=201", None, 400, "invalid_request", "limit"),
        ("PATCH", "/tenants/acme/projects/default", {"active": False}, 409, "default_project", "active"),
        ("PATCH", "/tenants/acme/projects/default", {"slug": "x"}, 400, "invalid_request", "slug"),
        ("POST", "/tenants/acme/projects", {"slug": "a b", "name": "x"}, 400, "invalid_request", "slug"),
        ("POST", "/tenants/acme/projects", {"slug": "default", "name": "x"}, 409, "slug_taken", "slug"),
        ("GET", f"/tenants/acme/principals/{UUID(int=7)}", None, 404, "principal_not_found", "principal_id"),
        (
            "POST",
            "/tenants/acme/principals",
            {"kind": "cat", "name": "x", "role": "member"},
            400,
            "invalid_request",
            "kind",
        ),
        (
            "POST",
            "/tenants/acme/principals",
            {"kind": "person", "name": "x", "role": "member"},
            400,
            "invalid_request",
            "email",
        ),
        ("POST", "/tenants/acme/keys", {"name": "x", "project": "none"}, 404, "project_not_found", "project"),
        ("POST", "/tenants/acme/keys", {"name": "x", "scopes": []}, 400, "invalid_request", "scopes"),
        ("POST", "/tenants/acme/keys", {"name": "x", "scopes": ["everything"]}, 400, "invalid_request", "scopes[0]"),
        ("POST", "/keys/nosuchkey00/rotate", {}, 404, "key_not_found", "key_id"),
        ("POST", "/keys/nosuchkey00/rotate", {"grace_s": -1}, 400, "invalid_request", "grace_s"),
        ("POST", "/keys/nosuchkey00/rotate", {"grace_s": 2_592_001}, 400, "invalid_request", "grace_s"),
        ("PATCH", "/tenants/acme", {"time_zone": "Mars/Base"}, 400, "invalid_request", "time_zone"),
        ("PATCH", "/tenants/acme", {"weight": 0}, 400, "invalid_request", "weight"),
        ("PATCH", "/tenants/acme", {"floor_tokens_per_s": -1}, 400, "invalid_request", "floor_tokens_per_s"),
        ("PATCH", "/tenants/acme", {"metadata": {"k": "a\nb"}}, 400, "invalid_request", "metadata"),
        ("GET", "/tenants/nobody", None, 404, "tenant_not_found", "slug"),
        ("PATCH", "/tenants/nobody", {"active": False}, 404, "tenant_not_found", "slug"),
        ("GET", "/tenants/nobody/keys", None, 404, "tenant_not_found", "slug"),
        ("POST", "/tenants/nobody/keys", {"name": "x"}, 404, "tenant_not_found", "slug"),
        ("GET", "/keys/nosuchkey00", None, 404, "key_not_found", "key_id"),
        ("DELETE", "/keys/nosuchkey00", None, 404, "key_not_found", "key_id"),
        ("POST", "/tenants", {"slug": "acme", "name": "x"}, 409, "slug_taken", "slug"),
        ("GET", "/tenants?limit=0", None, 400, "invalid_request", "limit"),
        ("GET", "/tenants?limit=1000", None, 400, "invalid_request", "limit"),
        ("GET", "/tenants?limit=x", None, 400, "invalid_request", "limit"),
        ("GET", "/tenants?after=junk", None, 400, "invalid_request", "after"),
        ("PATCH", "/tenants/acme", {"slug": "other"}, 400, "invalid_request", "slug"),
        ("PATCH", "/tenants/acme", {"name": None}, 400, "invalid_request", "name"),
        (
            "POST",
            "/tenants/acme/keys",
            {"name": "x", "expires_at": "2001-01-01T00:00:00Z"},
            400,
            "invalid_request",
            "expires_at",
        ),
        (
            "POST",
            "/tenants/acme/keys",
            {"name": "x", "expires_at": "2999-01-01T00:00:00"},
            400,
            "invalid_request",
            "expires_at",
        ),
    ],
)
async def test_a_refusal_names_what_is_wrong(
    deployed: Deployment, method: str, path: str, json: object, status: int, code: str, param: str
) -> None:
    error = body(await deployed.client.request(method, f"/api/v1{path}", json=json), status)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
