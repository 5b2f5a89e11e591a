"""The admin API of tenants and keys, as an operator uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

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
    ("method", "path", "json", "status", "code", "param"),
    [
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
