"""The page of a tenant's prompt log over HTTP, with the real service behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from controlplane.db import transaction
from controlplane.promptlog import service
from controlplane.settings import Settings
from controlplane.tenants.schemas import PromptLogging, Redaction
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in
from tests.controlplane.promptlog.test_service import entry
from tests.factories.rows import make_tenant

PAGE = "/tenants/globex/prompts"
EVIL = "<script>alert(1)</script>"


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings) as running:
        yield running


async def a_tenant(deployed: Deployment, *, on: bool, entries: int = 0) -> UUID:
    async with transaction(deployed.app.state.resources.engine) as session:
        tenant = await make_tenant(session, "globex")
        if on:
            await service.turn_on(session, "globex", PromptLogging())
        await service.store(session, [entry(tenant.id, number, prompt=EVIL) for number in range(entries)])
        return tenant.id


async def send(deployed: Deployment, path: str, **form: str) -> tuple[int, str]:
    token = await csrf_of(deployed.client, "/tenants")
    answer = await deployed.client.post(path, data={**form, "_csrf_token": token}, follow_redirects=False)
    return answer.status_code, answer.text


async def test_an_operator_turns_it_on_and_off_again(deployed: Deployment) -> None:
    await a_tenant(deployed, on=False)
    await log_in(deployed, deployed.operator_email)
    assert "No prompt and no answer of this tenant is kept anywhere." in (await deployed.client.get(PAGE)).text
    form = {"retention_days": "3", "sample": "50", "templates": "EMP-####, X-##", "emails": "on"}
    assert (await send(deployed, PAGE, **form))[0] == 303
    async with transaction(deployed.app.state.resources.engine) as session:
        shown = await service.show(session, "globex")
    assert (shown.retention_days, shown.sample) == (3, 0.5)
    assert (shown.redact, shown.templates) == ([Redaction.EMAILS], ["EMP-####", "X-##"])
    page = (await deployed.client.get(PAGE)).text
    assert "kept for 3 days, 50 % of requests, without emails, EMP-####, X-##" in page
    assert (await send(deployed, PAGE, **{**form, "sample": "0.5 %"}))[0] == 303
    page = (await deployed.client.get(PAGE)).text
    shown_again = page.split('id="field-sample"')[1].split('value="')[1].split('"')[0]
    assert (shown_again, "3 days, 0.5 % of requests" in page) == ("0.5%", True)
    assert (await send(deployed, PAGE, **{**form, "sample": shown_again}))[0] == 303
    assert (await send(deployed, f"{PAGE}/off"))[0] == 303
    async with transaction(deployed.app.state.resources.engine) as session:
        assert not (await service.show(session, "globex")).log_prompts


@pytest.mark.parametrize(
    ("field", "value"),
    [("retention_days", "31"), ("retention_days", ""), ("sample", "0"), ("sample", "101"), ("templates", "##")],
)
async def test_what_is_wrong_is_said_at_its_field(deployed: Deployment, field: str, value: str) -> None:
    await a_tenant(deployed, on=False)
    await log_in(deployed, deployed.operator_email)
    status, page = await send(deployed, PAGE, **{"retention_days": "7", "sample": "100", field: value})
    assert status == 422
    assert f'id="error-{field}"' in page


async def test_a_text_is_shown_escaped_to_who_asked_and_the_page_says_who_read_it(deployed: Deployment) -> None:
    await a_tenant(deployed, on=True, entries=1)
    await log_in(deployed, deployed.operator_email)
    listed = (await deployed.client.get(PAGE)).text
    assert "req-0" in listed
    assert "alert(1)" not in listed
    assert "Nobody has read any" in listed
    async with transaction(deployed.app.state.resources.engine) as session:
        number = (await service.list_entries(session, "globex")).items[0].id
    status, page = await send(deployed, f"{PAGE}/{number}/read")
    assert status == 200
    assert EVIL not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert deployed.operator_email in (await deployed.client.get(PAGE)).text.split('id="readings"')[1]


async def test_a_viewer_sees_the_list_and_no_way_to_a_text(deployed: Deployment) -> None:
    await a_tenant(deployed, on=True, entries=1)
    await log_in(deployed, deployed.viewer_email)
    page = (await deployed.client.get(PAGE)).text
    assert "req-0" in page
    assert "/read" not in page.split('id="logged-requests"')[1].split('id="readings"')[0]
    assert (await send(deployed, f"{PAGE}/1/read"))[0] == 403


async def test_lists_go_on_over_pages(deployed: Deployment) -> None:
    await a_tenant(deployed, on=True, entries=60)
    await log_in(deployed, deployed.viewer_email)
    first = (await deployed.client.get(PAGE)).text
    link = first.split(f'href="{PAGE}?after=')[1].split('"')[0]
    second = (await deployed.client.get(f"{PAGE}?after={link}")).text
    assert "req-59" in second
    assert "req-59" not in first
