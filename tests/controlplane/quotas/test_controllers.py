"""The admin API of quotas, raises, prices and requests for more, as an operator uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from controlplane.settings import Settings
from tests.controlplane.clients import Deployment, deployment

DAY = {"kind": "tokens_per_day", "hard": 1000}
PRICE = {"uncached_input": 2_000_000, "cached_input": 500_000, "output": 8_000_000}
TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()
NOBODY = str(uuid4())


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "quotas", "slo", "accounts"]) as running:
        running.client.headers.update(running.operator)
        yield running


def body(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_limit_is_made_shown_listed_changed_raised_and_removed(deployed: Deployment) -> None:
    api = deployed.client
    made = body(await api.post("/api/v1/tenants/acme/quotas", json={**DAY, "model": "m", "soft": 800}), 201)
    assert (made["tenant"], made["level"], made["model"], made["away"]) == ("acme", "tenant", "m", "closed")
    path = f"/api/v1/quotas/{made['id']}"
    assert body(await api.get(path)) == made
    assert body(await api.get("/api/v1/tenants/acme/quotas"))["items"] == [made]
    changed = body(await api.patch(path, json={"hard": 2000, "away": "local", "local": 50}))
    assert (changed["soft"], changed["hard"], changed["local"]) == (800, 2000, 50)
    raised = {"amount": 30, "expires_at": TOMORROW, "reason": "launch"}
    grant = body(await api.post(f"{path}/grants", json=raised), 201)
    assert grant["granted_by"].startswith("token")
    assert body(await api.get(path))["raised"] == 30
    assert body(await api.get(f"{path}/grants"))["items"] == [grant]
    body(await api.delete(f"{path}/grants/{grant['id']}"))
    assert body(await api.delete(path))["raised"] == 0
    assert body(await api.get(path), 404)["error"]["code"] == "quota_not_found"


async def test_prices_are_set_listed_and_taken_back(deployed: Deployment) -> None:
    api = deployed.client
    now = body(await api.post("/api/v1/prices", json=PRICE), 201)
    assert (now["pool"], now["valid_until"], now["device_second"]) == (None, None, 0)
    planned = body(await api.post("/api/v1/prices", json={**PRICE, "valid_from": TOMORROW}), 201)
    assert body(await api.get(f"/api/v1/prices/{now['id']}"))["valid_until"] == planned["valid_from"]
    assert [row["id"] for row in body(await api.get("/api/v1/prices"))["items"]] == [planned["id"], now["id"]]
    in_force = body(await api.get("/api/v1/prices", params={"at": datetime.now(UTC).isoformat(), "pool": ""}))
    assert [row["id"] for row in in_force["items"]] == [now["id"]]
    body(await api.delete(f"/api/v1/prices/{planned['id']}"))
    assert body(await api.get(f"/api/v1/prices/{now['id']}"))["valid_until"] is None
    assert body(await api.delete(f"/api/v1/prices/{now['id']}"), 409)["error"]["code"] == "price_in_force"


async def test_a_request_for_more_is_approved_once(deployed: Deployment) -> None:
    api = deployed.client
    quota = body(await api.post("/api/v1/tenants/acme/quotas", json=DAY), 201)
    asked = {"kind": "tokens_per_day", "amount": 500, "reason": "growth"}
    request = body(await api.post("/api/v1/tenants/acme/quota-requests", json=asked), 201)
    waiting = body(await api.get("/api/v1/quota-requests", params={"status": "open", "tenant": "acme"}))["items"]
    assert waiting == [request]
    path = f"/api/v1/quota-requests/{request['id']}"
    assert body(await api.post(f"{path}/approve", json={"note": "enjoy"}))["state"] == "approved"
    assert body(await api.get(path))["note"] == "enjoy"
    assert body(await api.get(f"/api/v1/quotas/{quota['id']}"))["hard"] == 1500
    for decision in ("approve", "decline"):
        assert body(await api.post(f"{path}/{decision}", json={}), 409)["error"]["code"] == "request_decided"
    assert body(await api.get(f"/api/v1/quotas/{quota['id']}"))["hard"] == 1500


async def test_an_approval_that_fails_changes_nothing(deployed: Deployment) -> None:
    api = deployed.client
    quota = body(await api.post("/api/v1/tenants/acme/quotas", json=DAY), 201)
    asked = {"quota_id": quota["id"], "amount": 5, "reason": "x"}
    request = body(await api.post("/api/v1/tenants/acme/quota-requests", json=asked), 201)
    body(await api.delete(f"/api/v1/quotas/{quota['id']}"))
    path = f"/api/v1/quota-requests/{request['id']}"
    assert body(await api.post(f"{path}/approve", json={}), 409)["error"]["code"] == "quota_gone"
    assert body(await api.get(path))["state"] == "open"


async def test_f36_no_list_shows_what_is_another_tenants(deployed: Deployment) -> None:
    api = deployed.client
    body(await api.post("/api/v1/tenants", json={"slug": "globex", "name": "Globex"}), 201)
    for slug in ("acme", "globex"):
        body(await api.post(f"/api/v1/tenants/{slug}/quotas", json=DAY), 201)
        asked = {"kind": "tokens_per_day", "amount": 5, "reason": "x"}
        body(await api.post(f"/api/v1/tenants/{slug}/quota-requests", json=asked), 201)
    for path in ("/api/v1/tenants/acme/quotas", "/api/v1/quota-requests?tenant=acme"):
        assert [row["tenant"] for row in body(await api.get(path))["items"]] == ["acme"], path
    assert len(body(await api.get("/api/v1/quota-requests"))["items"]) == 2


async def test_f10_a_repeated_creation_makes_one(deployed: Deployment) -> None:
    api = deployed.client
    again = {"idempotency-key": "once"}
    made = [body(await api.post("/api/v1/tenants/acme/quotas", json=DAY, headers=again), 201) for _ in range(2)]
    assert made[0] == made[1]
    prices = [body(await api.post("/api/v1/prices", json=PRICE, headers=again), 201) for _ in range(2)]
    assert prices[0] == prices[1]


async def test_f10_a_repeat_that_asks_for_something_else_is_refused_by_name(deployed: Deployment) -> None:
    api, once = deployed.client, {"idempotency-key": "once"}
    soon, later = ((datetime.now(UTC) + timedelta(days=days)).isoformat() for days in (1, 2))
    quota = body(await api.post("/api/v1/tenants/acme/quotas", json=DAY), 201)["id"]
    limit = {"kind": "requests_per_minute", "hard": 9}
    more = {"quota_id": quota, "amount": 5, "reason": "launch", "until": soon}
    grant = {"amount": 5, "reason": "launch", "expires_at": soon}
    for path, sent, changed in (
        ("tenants/acme/quotas", limit, {"hard": 8, "soft": 1, "model": "m", "kind": "tokens_per_minute"}),
        ("tenants/acme/quota-requests", more, {"amount": 6, "reason": "other", "until": later}),
        (f"quotas/{quota}/grants", grant, {"amount": 6, "reason": "other", "expires_at": later, "starts_at": soon}),
        ("prices", PRICE, {"output": 1, "pool": "gpu", "valid_from": later}),
        ("slos", {"availability": 0.9}, {"availability": 0.8, "window_days": 7, "pool": "gpu", "enabled": False}),
    ):
        made = body(await api.post(f"/api/v1/{path}", json=sent, headers=once), 201)
        for param, value in changed.items():
            also = {"expires_at": later} if param == "starts_at" else {}
            answer = await api.post(f"/api/v1/{path}", json={**sent, **also, param: value}, headers=once)
            error = body(answer, 409)["error"]
            assert error["code"] == "idempotency_mismatch"
            assert error["param"] in {param, *also}
        assert body(await api.post(f"/api/v1/{path}", json=sent, headers=once), 201) == made


ACME = "/tenants/acme/quotas"


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "code", "param"),
    [
        ("GET", "/tenants/nobody/quotas", None, 404, "tenant_not_found", "slug"),
        ("GET", f"{ACME}?limit=0", None, 400, "invalid_request", "limit"),
        ("GET", f"{ACME}?after=junk", None, 400, "invalid_request", "after"),
        ("GET", f"{ACME}?kind=junk", None, 400, "invalid_request", "kind"),
        ("GET", "/prices?at=junk", None, 400, "invalid_request", "at"),
        ("GET", "/prices?at=2026-01-01T00:00:00", None, 400, "invalid_request", "at"),
        ("GET", "/quota-requests?status=junk", None, 400, "invalid_request", "status"),
        ("POST", ACME, {"kind": "tokens_per_day"}, 400, "invalid_request", "hard"),
        ("POST", ACME, {"hard": 5}, 400, "invalid_request", "kind"),
        ("POST", ACME, {**DAY, "kind": "tokens_per_year"}, 400, "invalid_request", "kind"),
        ("POST", ACME, {**DAY, "hard": -1}, 400, "invalid_request", "hard"),
        ("POST", ACME, {**DAY, "hard": 1.5}, 400, "invalid_request", "hard"),
        ("POST", ACME, {**DAY, "hard": 10**30}, 400, "invalid_request", "hard"),
        ("POST", ACME, {**DAY, "burst": 1}, 400, "invalid_request", "burst"),
        ("POST", ACME, {**DAY, "project": "nowhere"}, 404, "project_not_found", "project"),
        ("POST", ACME, {**DAY, "key": "nosuchkey00"}, 404, "key_not_found", "key"),
        ("PATCH", f"/quotas/{NOBODY}", {"hard": 1}, 404, "quota_not_found", "quota_id"),
        ("GET", f"/quotas/{NOBODY}/grants", None, 404, "quota_not_found", "quota_id"),
        ("DELETE", f"/quotas/{NOBODY}/grants/{NOBODY}", None, 404, "grant_not_found", "grant_id"),
        (
            "POST",
            f"/quotas/{NOBODY}/grants",
            {"amount": 1, "expires_at": "2999-01-01T00:00:00", "reason": "x"},
            400,
            "invalid_request",
            "expires_at",
        ),
        ("POST", "/prices", {**PRICE, "output": -1}, 400, "invalid_request", "output"),
        ("POST", "/prices", {**PRICE, "valid_from": "2001-01-01T00:00:00Z"}, 400, "invalid_request", "valid_from"),
        ("GET", f"/prices/{NOBODY}", None, 404, "price_not_found", "price_id"),
        ("POST", f"/quota-requests/{NOBODY}/approve", {}, 404, "request_not_found", "request_id"),
        ("POST", "/tenants/acme/quota-requests", {"amount": 1, "reason": "x"}, 400, "invalid_request", "quota_id"),
        (
            "POST",
            "/tenants/acme/quota-requests",
            {"amount": 1, "reason": "x", "kind": "tokens_per_day", "until": "2001-01-01T00:00:00Z"},
            400,
            "invalid_request",
            "until",
        ),
    ],
)
async def test_a_refusal_names_what_is_wrong(
    deployed: Deployment, method: str, path: str, json: object, status: int, code: str, param: str
) -> None:
    error = body(await deployed.client.request(method, f"/api/v1{path}", json=json), status)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
