"""The Policy page and the page of a request for more over HTTP, with the real services behind them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from controlplane.db import transaction
from controlplane.quotas import request_service, service
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import GrantSpec, QuotaPatch, QuotaRequestSpec, QuotaRequestView, QuotaSpec, QuotaView
from controlplane.settings import Settings
from controlplane.telemetry.intake import store
from controlplane.tenants.prompt_logging import set_prompt_logging
from controlplane.tenants.schemas import PromptLogging
from controlplane.tenants.service import policy_epoch
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in
from tests.controlplane.statements import counted_queries
from tests.controlplane.telemetry.reports import gateway_report

DAY = QuotaKind.TOKENS_PER_DAY


@pytest.fixture
async def operator(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings) as running:
        await log_in(running, running.operator_email)
        yield running


async def post(deployed: Deployment, path: str, **data: str) -> httpx.Response:
    token = await csrf_of(deployed.client, "/tenants")
    return await deployed.client.post(path, data={"_csrf_token": token, **data}, follow_redirects=False)


async def limited(deployed: Deployment, hard: int = 1000) -> QuotaView:
    async with transaction(deployed.app.state.resources.engine) as session:
        return await service.create_quota(session, deployed.tenant, QuotaSpec(kind=DAY, hard=hard))


async def now(deployed: Deployment, quota: QuotaView) -> QuotaView:
    async with transaction(deployed.app.state.resources.engine) as session:
        return await service.get_quota(session, quota.id)


def newest(page: httpx.Response) -> tuple[int, str]:
    """The newest change's number and its row's text."""
    assert page.status_code == 200, page.text
    row = re.search(r'<tr id="change-(\d+)">(.*?)</tr>', page.text, re.DOTALL)
    assert row is not None, page.text
    return int(row[1]), plain(row[2])


def plain(html: str) -> str:
    """What is read of `html`, each run of white space as one."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


async def test_f17_skew_shows_by_name_and_age_on_the_page(operator: Deployment) -> None:
    page = await operator.client.get("/policy")
    assert "Nobody has reported yet" in page.text
    async with transaction(operator.app.state.resources.engine) as session:
        epoch = await policy_epoch(session)
        for name, at in (("fresh", epoch), ("torn", epoch + 3)):
            await store(session, [gateway_report([], gateway=name, policy_epoch=at)], time.time())
    page = await operator.client.get("/policy")
    assert "Current" in page.text
    assert "Ahead of the database" in page.text
    assert 'data-skewed="1"' in page.text


async def test_f17_one_click_takes_a_change_back_and_a_second_is_told_why_not(operator: Deployment) -> None:
    quota = await limited(operator)
    await post(operator, f"/quotas/{quota.id}", hard="5", away="closed")
    number, row = newest(await operator.client.get("/policy"))
    assert "hard: 1,000" in row
    assert "5" in row
    assert operator.operator_email in row
    answer = await post(operator, f"/policy/changes/{number}/rollback")
    assert (answer.status_code, answer.headers["location"]) == (303, "/policy")
    assert (await now(operator, quota)).hard == 1000
    _, row = newest(await operator.client.get("/policy"))
    assert f"takes back change {number}" in row
    answer = await post(operator, f"/policy/changes/{number}/rollback")
    assert answer.status_code == 409
    assert "It has changed since" in answer.text
    assert (await now(operator, quota)).hard == 1000


async def test_each_field_of_a_prompt_log_is_told_on_its_own(operator: Deployment) -> None:
    engine = operator.app.state.resources.engine
    for wanted in (PromptLogging(retention_days=7, templates=["EMP-####"]), PromptLogging(retention_days=3)):
        async with transaction(engine) as session:
            await set_prompt_logging(session, operator.tenant, wanted)
        page = await operator.client.get("/policy")
        number, row = newest(page)
        assert "{" not in row
        assert f"rollback-{number}" not in page.text
    assert "prompt log retention days: 7 → 3" in row
    assert "prompt log templates: EMP-#### → —" in row
    assert "redact" not in row


async def test_a_limit_of_money_is_told_in_its_unit(operator: Deployment) -> None:
    async with transaction(operator.app.state.resources.engine) as session:
        spec = QuotaSpec(kind=QuotaKind.MONEY_PER_DAY, hard=2_500_000)
        quota = await service.create_quota(session, operator.tenant, spec)
        await service.change_quota(session, quota.id, QuotaPatch(hard=3_000_001))
    _, row = newest(await operator.client.get("/policy"))
    assert "hard: 2.500000 units of money → 3.000001 units of money" in row


async def test_what_can_never_be_taken_back_is_not_offered_and_times_read_as_times(operator: Deployment) -> None:
    assert (await post(operator, "/tenants", slug="fresh", name="Fresh")).status_code == 303
    page = await operator.client.get("/policy")
    number, row = newest(page)
    assert "Tenant made" in row
    assert f"rollback-{number}" not in page.text
    assert "— → —" not in plain(page.text)
    quota = await limited(operator)
    async with transaction(operator.app.state.resources.engine) as session:
        soon = datetime.now(UTC) + timedelta(days=2)
        await service.grant(session, quota.id, GrantSpec(amount=1, expires_at=soon, reason="x"), by="op")
    page = await operator.client.get("/policy")
    number, row = newest(page)
    assert f"expires at: — → {soon:%Y-%m-%d %H:%M:%S} UTC" in row
    assert f"rollback-{number}" in page.text


async def test_a_viewer_sees_changes_and_no_way_to_take_them_back(operator: Deployment) -> None:
    await limited(operator)
    operator.client.cookies.clear()
    await log_in(operator, operator.viewer_email)
    page = await operator.client.get("/policy")
    number, _ = newest(page)
    assert "Roll back" not in page.text
    token = await csrf_of(operator.client, "/policy")
    answer = await operator.client.post(f"/policy/changes/{number}/rollback", data={"_csrf_token": token})
    assert answer.status_code == 403


async def test_f31_the_page_costs_the_same_however_much_has_changed(operator: Deployment) -> None:
    engine = operator.app.state.resources.engine

    async def cost() -> int:
        await operator.client.get("/policy")
        with counted_queries(engine) as statements:
            await operator.client.get("/policy")
        return len(statements)

    few = await cost()
    quota = await limited(operator)
    async with transaction(engine) as session:
        for hard in range(60):
            await service.change_quota(session, quota.id, QuotaPatch(hard=hard + 1))
    assert await cost() == few
    page = await operator.client.get("/policy")
    assert page.text.count('<tr id="change-') == 50
    assert "Next page" in page.text


async def asked(deployed: Deployment) -> tuple[QuotaView, QuotaRequestView]:
    quota = await limited(deployed)
    until = datetime.now(UTC) + timedelta(days=3)
    spec = QuotaRequestSpec(quota_id=quota.id, amount=500, reason="launch <week>", until=until)
    async with transaction(deployed.app.state.resources.engine) as session:
        return quota, await request_service.ask(session, deployed.tenant, spec, by="key k1")


async def test_requests_that_wait_are_counted_in_the_menu(operator: Deployment) -> None:
    assert (await operator.client.get("/quota-requests/waiting")).text.strip() == ""
    await asked(operator)
    assert re.search(r">1<span[^>]*> requests", (await operator.client.get("/quota-requests/waiting")).text)
    assert 'hx-get="/quota-requests/waiting"' in (await operator.client.get("/quotas")).text


async def test_a_request_shows_the_limit_in_force_and_that_only_approving_needs_an_amount(operator: Deployment) -> None:
    quota, request = await asked(operator)
    page = f"/quota-requests/{request.id}"
    text = plain((await operator.client.get(page)).text)
    assert "Limit in force 1,000 Of" in text
    assert "Give how much more Added to the limit; approving needs it." in text
    later = datetime.now(UTC) + timedelta(days=1)
    async with transaction(operator.app.state.resources.engine) as session:
        await service.grant(session, quota.id, GrantSpec(amount=250, expires_at=later, reason="x"), by="op")
    answer = await operator.client.get(page)
    assert "Limit in force 1,250 1,000 , raised by 250 Of" in plain(answer.text)
    assert 'value="decline" formnovalidate' in answer.text


async def test_an_operator_gives_less_for_shorter_with_a_note(operator: Deployment) -> None:
    quota, request = await asked(operator)
    page = f"/quota-requests/{request.id}"
    assert "launch &lt;week&gt;" in (await operator.client.get(page)).text
    until = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M")
    answer = await post(operator, page, decision="approve", amount="200", until=until, note="this much")
    assert (answer.status_code, answer.headers["location"]) == (303, page)
    shown = (await operator.client.get(page)).text
    assert "Approved" in shown
    assert "this much" in shown
    given = await now(operator, quota)
    assert (given.hard, given.raised) == (1000, 200)
    assert (await operator.client.get("/quota-requests/waiting")).text.strip() == ""


@pytest.mark.parametrize(
    ("field", "form"),
    [
        ("amount", {"amount": "", "until": ""}),
        ("amount", {"amount": "0", "until": ""}),
        ("until", {"amount": "5", "until": "2020-01-01T00:00"}),
        ("until", {"amount": "5", "until": "soon"}),
        ("note", {"amount": "5", "until": "", "note": "x" * 501}),
    ],
)
async def test_a_refused_decision_is_shown_again_and_decides_nothing(
    operator: Deployment, field: str, form: dict[str, str]
) -> None:
    quota, request = await asked(operator)
    answer = await post(operator, f"/quota-requests/{request.id}", decision="approve", **form)
    assert answer.status_code == 422
    assert f'id="error-{field}"' in answer.text
    assert (await now(operator, quota)).raised == 0
    answer = await post(operator, f"/quota-requests/{request.id}", decision="decline", note="no room")
    assert answer.status_code == 303
    assert "Declined" in (await operator.client.get(f"/quota-requests/{request.id}")).text
