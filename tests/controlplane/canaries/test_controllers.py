"""Canaries on the admin API, the command line, the console and /metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from controlplane.canaries import service
from controlplane.canaries.cli import _show
from controlplane.canaries.repository import Run
from controlplane.canaries.schemas import Proof, Verdict
from controlplane.db import transaction
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import QuotaSpec
from controlplane.settings import Settings
from controlplane.tenants.schemas import PROBE_TENANT
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in

WHY = "not refused above the limit"


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings) as running:
        yield running


async def prove_some(deployed: Deployment) -> int:
    """All canaries, the first proven and the second failing; how many there are."""
    async with transaction(deployed.app.state.resources.engine) as session:
        run = await service.claim(session, gateways=["http://gw:1"], every_s=3600.0, holder="test", now=1e9)
        assert run is not None
        begun: Run = await service.begin(session, run, holder="test")
        due = await service.due(session, begun, 1000)
        await service.conclude(session, begun, due[0][0], Proof(verdict=Verdict.PROVEN, seconds=0.5))
        await service.conclude(session, begun, due[1][0], Proof(verdict=Verdict.FAILED, why=WHY, seconds=0.5))
        return len(due)


async def test_pages_walk_all_canaries_in_order(deployed: Deployment) -> None:
    number = await prove_some(deployed)
    seen, after = [], ""
    while True:
        query = {"limit": "50", **({"after": after} if after else {})}
        answer = (await deployed.client.get("/api/v1/canaries", params=query, headers=deployed.viewer)).json()
        seen += answer["items"]
        after = answer["next"]
        if after is None:
            break
    assert [row["id"] for row in seen] == sorted({row["id"] for row in seen})
    assert len(seen) == number
    assert [(row["state"], row["why"]) for row in seen[:3]] == [("proven", ""), ("failing", WHY), ("never_run", "")]
    assert seen[0]["proven_at"] and not seen[0]["failed_at"]


@pytest.mark.parametrize("cursor", ["x", "kqE"])
async def test_a_cursor_of_nowhere_is_refused(deployed: Deployment, cursor: str) -> None:
    answer = await deployed.client.get("/api/v1/canaries", params={"after": cursor}, headers=deployed.viewer)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_an_operator_asks_for_a_run_and_a_viewer_may_not(deployed: Deployment) -> None:
    number = await prove_some(deployed)
    answer = await deployed.client.post("/api/v1/canaries/run", headers=deployed.viewer)
    assert answer.status_code == 403
    answer = await deployed.client.post("/api/v1/canaries/run", headers=deployed.operator)
    assert (answer.status_code, answer.json()["canaries"]) == (202, number)
    async with transaction(deployed.app.state.resources.engine) as session:
        waiting = await session.scalars(text("SELECT window_start FROM canary_runs WHERE holder IS NULL"))
        assert waiting.all() == [answer.json()["window_start"]]


async def test_the_reserved_slug_is_refused(deployed: Deployment) -> None:
    body = {"slug": PROBE_TENANT, "name": "mine"}
    answer = await deployed.client.post("/api/v1/tenants", json=body, headers=deployed.operator)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "slug_reserved")


async def test_f5_pages_show_when_a_limit_was_last_proven(deployed: Deployment) -> None:
    await log_in(deployed, deployed.operator_email)
    empty = (await deployed.client.get("/canaries")).text
    assert "No canary yet" in empty
    await prove_some(deployed)
    page = (await deployed.client.get("/canaries")).text
    assert WHY in page and "Failing</span>" in page and "Requests per minute" in page
    table = page[page.index("<tbody") :]
    assert table.index("Failing</span>") < table.index("Proven</span>") and table.count(WHY) == 1
    other = (await deployed.client.get("/api/v1/canaries?limit=1", headers=deployed.viewer)).json()["next"]
    assert WHY not in (await deployed.client.get("/canaries", params={"after": other})).text
    async with transaction(deployed.app.state.resources.engine) as session:
        spec = QuotaSpec(kind=QuotaKind.TOKENS_PER_MINUTE, hard=5)
        quota = await quotas.create_quota(session, deployed.tenant, spec)
    for path in (f"/tenants/{deployed.tenant}/quotas", f"/quotas/{quota.id}"):
        page = (await deployed.client.get(path)).text
        assert "Last proven" in page and "Failing" in page, path
    token = await csrf_of(deployed.client, "/tenants")
    answer = await deployed.client.post("/canaries/run", data={"_csrf_token": token}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/canaries")


async def test_f32_metrics_tell_the_last_proof_of_each_by_fixed_labels(deployed: Deployment) -> None:
    number = await prove_some(deployed)
    token = deployed.settings.internal_token.reveal()
    body = (await deployed.client.get("/metrics", headers={"authorization": f"Bearer {token}"})).text
    proven = [line for line in body.splitlines() if line.startswith("tidegate_canary_last_proven_seconds{")]
    assert len(proven) == number
    assert sum(not line.endswith(" 0.0") for line in proven) == 1
    assert 'tidegate_canaries{state="failing"} 1.0' in body
    assert f'tidegate_canaries{{state="never_run"}} {number - 2:.1f}' in body


def test_the_command_prints_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "gateway": "http://gw:1",
        "endpoint": "/completions",
        "level": "key",
        "kind": "tokens_per_day",
        "state": "never_run",
        "why": "",
        "proven_at": None,
        "failed_at": "2026-11-30T12:00:00Z",
    }
    _show([row], as_json=False)
    printed = capsys.readouterr().out
    assert "tokens_per_day" in printed and "never run" in printed and "2026-11-30 12:00Z" in printed
