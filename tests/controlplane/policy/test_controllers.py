"""The admin API and the command line of the policy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from controlplane.settings import Settings
from tests.controlplane.clients import Deployment, deployment


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings) as running:
        running.client.headers.update(running.operator)
        yield running


def body(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_changes_through_the_api_carry_its_caller_and_are_taken_back(deployed: Deployment) -> None:
    api = deployed.client
    before = body(await api.get("/api/v1/policy"))
    assert (before["holders"], before["skewed"]) == ([], 0)
    slo = body(await api.post("/api/v1/slos", json={"availability": 0.99}), 201)
    body(await api.patch(f"/api/v1/slos/{slo['id']}", json={"availability": 0.5}))
    assert body(await api.get("/api/v1/policy"))["epoch"] == before["epoch"] + 2
    page = body(await api.get("/api/v1/policy/changes", params={"limit": 1, "kind": "slos"}))
    change = page["items"][0]
    assert change["who"].startswith("token")
    assert (change["before"]["availability"], change["after"]["availability"]) == (0.99, 0.5)
    assert body(await api.get(f"/api/v1/policy/changes/{change['id']}")) == change
    older = body(await api.get("/api/v1/policy/changes", params={"kind": "slos", "after": page["next"]}))["items"]
    assert [one["before"] for one in older] == [None]
    path = f"/api/v1/policy/changes/{change['id']}/rollback"
    assert body(await api.post(path))["restores"] == change["id"]
    assert body(await api.get(f"/api/v1/slos/{slo['id']}"))["availability"] == 0.99
    assert body(await api.post(path), 409)["error"]["code"] == "changed_since"


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "/changes/999999", 404, "change_id"),
        ("POST", "/changes/999999/rollback", 404, "change_id"),
        ("GET", f"/changes/{10**30}", 404, "change_id"),
        ("GET", "/changes?after=junk", 400, "after"),
        ("GET", "/changes?limit=0", 400, "limit"),
        ("GET", "/changes?kind=keys", 400, "kind"),
        ("GET", "/changes?tenants=acme", 400, "tenants"),
    ],
)
async def test_bad_input_is_refused_by_name(
    deployed: Deployment, method: str, path: str, status: int, param: str
) -> None:
    error = body(await deployed.client.request(method, f"/api/v1/policy{path}"), status)["error"]
    assert error["param"] == param, json.dumps(error)


async def test_a_viewer_reads_and_takes_nothing_back(deployed: Deployment) -> None:
    deployed.client.headers.update(deployed.viewer)
    changes = body(await deployed.client.get("/api/v1/policy/changes"))["items"]
    answer = await deployed.client.post(f"/api/v1/policy/changes/{changes[0]['id']}/rollback")
    assert body(answer, 403)["error"]["code"] == "read_only"
