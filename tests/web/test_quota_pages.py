"""The pages of quotas, prices and objectives over HTTP, with the real services behind them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from controlplane.db import transaction
from controlplane.quotas import price_service, request_service, service
from controlplane.quotas.request_service import Asker
from controlplane.quotas.schemas import Away, QuotaKind
from controlplane.quotas.views import GrantSpec, MoreSpec, QuotaRequestSpec, QuotaSpec, QuotaView, RequestState
from controlplane.slo import service as slo_service
from controlplane.tenants.service import create_key, get_tenant
from tests.controlplane.clients import Deployment, csrf_of
from tests.controlplane.statements import counted_queries
from tests.factories.rows import make_tenant

pytestmark = pytest.mark.asyncio(loop_scope="module")

DAY = QuotaSpec(kind=QuotaKind.TOKENS_PER_DAY, hard=1_234_567)
HTMX = {"hx-request": "true"}
TOMORROW = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M")


async def made(deployed: Deployment, spec: QuotaSpec = DAY) -> QuotaView:
    """A limit of a tenant of its own."""
    async with transaction(deployed.app.state.resources.engine) as session:
        tenant = await make_tenant(session)
        return await service.create_quota(session, tenant.slug, spec)


async def now(deployed: Deployment, quota: QuotaView) -> QuotaView:
    async with transaction(deployed.app.state.resources.engine) as session:
        return await service.get_quota(session, quota.id)


async def post(deployed: Deployment, path: str, data: dict[str, str] | None = None) -> httpx.Response:
    token = await csrf_of(deployed.client, "/tenants")
    return await deployed.client.post(path, data={"_csrf_token": token, **(data or {})}, follow_redirects=False)


def problem(answer: httpx.Response, field: str) -> str:
    """The sentence at `field` of a form that was shown again."""
    assert answer.status_code == 422, answer.text
    found = re.search(rf'id="error-(?:field-)?{field}">([^<]+)<', answer.text)
    assert found, answer.text
    assert f'name="{field}"' in answer.text
    return found.group(1)


@pytest.mark.parametrize("path", ["/quotas", "/tenants/acme/quotas", "/prices", "/slos"])
async def test_every_page_says_what_it_is_when_there_is_nothing(operator: Deployment, path: str) -> None:
    answer = await operator.client.get(path)
    assert answer.status_code == 200
    assert answer.text.count("<h1") == 1
    assert 'aria-current="page"' in answer.text
    assert "empty-state" in answer.text


async def test_a_limit_is_made_changed_raised_and_removed_with_forms(operator: Deployment) -> None:
    quota = await made(operator)
    here = f"/tenants/{quota.tenant}/quotas"
    form = {"kind": "requests_per_minute", "hard": "1,000", "soft": "", "away": "local", "local": "50", "model": "m<1>"}
    answer = await post(operator, here, form)
    assert (answer.status_code, answer.headers["location"]) == (303, here)
    page = (await operator.client.get(here)).text
    assert "Requests per minute" in page
    assert "1,234,567" in page
    assert "m&lt;1&gt;" in page
    detail = f"/quotas/{quota.id}"
    answer = await post(operator, detail, {"hard": "99", "soft": "9", "away": "open", "local": ""})
    assert answer.status_code == 303
    changed = await now(operator, quota)
    assert (changed.soft, changed.hard, changed.away) == (9, 99, Away.OPEN)
    raised = {"amount": "5", "expires_at": TOMORROW, "reason": "launch <week>"}
    assert (await post(operator, f"{detail}/grants", raised)).status_code == 303
    assert (await now(operator, quota)).raised == 5
    page = (await operator.client.get(detail)).text
    assert "launch &lt;week&gt;" in page
    end = re.search(rf'action="({detail}/grants/[^"]+/end)"', page)
    assert end
    assert (await post(operator, end.group(1))).status_code == 303
    assert (await now(operator, quota)).raised == 0
    page = (await operator.client.get(detail)).text
    assert "Over" in page
    assert "/end" not in page
    answer = await post(operator, f"{detail}/delete")
    assert (answer.status_code, answer.headers["location"]) == (303, here)
    assert (await operator.client.get(detail)).status_code == 404


async def test_money_is_shown_in_its_unit_and_everything_else_as_it_is_counted(operator: Deployment) -> None:
    money = QuotaSpec(kind=QuotaKind.MONEY_PER_MONTH, soft=1_000_000, hard=12_500_000)
    quota = await made(operator, money)
    raised = {"amount": "250000", "expires_at": TOMORROW, "reason": "launch"}
    assert (await post(operator, f"/quotas/{quota.id}/grants", raised)).status_code == 303
    for path in (f"/quotas/{quota.id}", f"/tenants/{quota.tenant}/quotas"):
        page = text_of(await operator.client.get(path))
        for amount in ("1.000000", "12.500000", "0.250000"):
            assert f"{amount}&nbsp;units of money" in page
        assert "12,500,000" not in page
    tokens = await made(operator)
    assert "units of money" not in text_of(await operator.client.get(f"/quotas/{tokens.id}"))


def text_of(page: httpx.Response) -> str:
    assert page.status_code == 200, page.text
    return re.sub(r"<[^>]+>", "", page.text)


async def test_a_repeat_key_that_no_form_of_ours_has_is_refused(operator: Deployment) -> None:
    quota = await made(operator)
    form = {"kind": "requests_per_minute", "hard": "1,000", "away": "closed", "idempotency_key": "x" * 5000}
    assert (await post(operator, f"/tenants/{quota.tenant}/quotas", form)).status_code == 400


@pytest.mark.parametrize(
    ("form", "field", "sentence"),
    [
        ({"kind": "requests_per_minute", "away": "closed"}, "hard", "A quota needs a hard limit"),
        ({"kind": "requests_per_minute", "hard": "many", "away": "closed"}, "hard", "whole number"),
        ({"kind": "requests_per_minute", "hard": "1,5", "away": "closed"}, "hard", "whole number"),
        ({"kind": "nothing", "hard": "1", "away": "closed"}, "kind", "Choose what to limit"),
        ({"kind": "requests_per_minute", "hard": "1", "away": "never"}, "away", "Choose what happens"),
        ({"kind": "requests_per_minute", "hard": "1", "soft": "2", "away": "closed"}, "soft", "cannot be higher"),
        ({"kind": "requests_per_minute", "hard": "1", "away": "closed", "project": "x"}, "project", "no project x"),
        ({"kind": "requests_per_minute", "hard": "1", "away": "closed", "key": "x"}, "key", "no API key x"),
        ({"kind": "tokens_per_day", "hard": "1", "away": "closed"}, "kind", "There is such a limit"),
    ],
)
async def test_a_refused_limit_is_shown_again_as_it_was_filled_in(
    operator: Deployment, form: dict[str, str], field: str, sentence: str
) -> None:
    quota = await made(operator)
    answer = await post(operator, f"/tenants/{quota.tenant}/quotas", {**form, "model": "" if field == "kind" else "mm"})
    assert sentence in problem(answer, field)
    assert "<details" in answer.text
    assert re.search(r'id="create-quota"[^>]* open>', answer.text)


async def test_a_refused_change_or_raise_changes_nothing(operator: Deployment) -> None:
    quota = await made(operator)
    detail = f"/quotas/{quota.id}"
    assert "hard limit" in problem(await post(operator, detail, {"away": "closed"}), "hard")
    raise_form = {"amount": "5", "expires_at": "2001-01-01T00:00", "reason": "x"}
    assert "past" in problem(await post(operator, f"{detail}/grants", raise_form), "expires_at")
    assert "missing" in problem(await post(operator, f"{detail}/grants", {**raise_form, "amount": ""}), "amount")
    assert await now(operator, quota) == quota


async def test_a_form_sent_twice_raises_once(operator: Deployment) -> None:
    quota = await made(operator)
    form = {"amount": "5", "expires_at": TOMORROW, "reason": "x", "idempotency_key": "the-form"}
    for _ in range(2):
        assert (await post(operator, f"/quotas/{quota.id}/grants", form)).status_code == 303
    assert (await now(operator, quota)).raised == 5


async def test_requests_for_more_wait_on_the_page_until_they_are_decided(operator: Deployment) -> None:
    quota = await made(operator)
    engine = operator.app.state.resources.engine
    async with transaction(engine) as session:
        asked = [
            await request_service.ask(
                session,
                quota.tenant,
                QuotaRequestSpec(amount=amount, reason=f"need {amount}", quota_id=quota.id),
                by="k",
            )
            for amount in (10, 7)
        ]
    page = (await operator.client.get("/quotas")).text
    assert "need 10" in page
    assert "need 7" in page
    assert (await post(operator, f"/quota-requests/{asked[0].id}/approve")).status_code == 303
    assert (await post(operator, f"/quota-requests/{asked[1].id}/decline")).status_code == 303
    assert (await now(operator, quota)).hard == 1_234_577
    assert "need" not in (await operator.client.get("/quotas")).text
    assert (await post(operator, f"/quota-requests/{asked[0].id}/approve")).status_code == 409
    async with transaction(engine) as session:
        decided = await request_service.get_request(session, asked[1].id)
    assert (decided.state, decided.decided_by) == (RequestState.DECLINED, operator.operator_email)


async def test_prices_are_set_planned_and_taken_back(operator: Deployment) -> None:
    form = {"pool": "gpu-a", "uncached_input": "2,000,000", "cached_input": "1", "output": "8000000"}
    assert (await post(operator, "/prices", form)).status_code == 303
    assert (await post(operator, "/prices", {**form, "valid_from": TOMORROW})).status_code == 303
    page = (await operator.client.get("/prices")).text
    assert page.count("In force") == 1
    assert page.count("Planned") == 1
    assert "2,000,000" in page
    assert operator.operator_email in page
    back = re.search(r'action="(/prices/[^"]+/take-back)"', page)
    assert back
    assert (await post(operator, back.group(1))).status_code == 303
    async with transaction(operator.app.state.resources.engine) as session:
        rows = (await price_service.list_prices(session, pool="gpu-a")).items
    assert [row.valid_until for row in rows] == [None]
    refused = await post(operator, "/prices", {**form, "valid_from": "2001-01-01T00:00"})
    assert "past" in problem(refused, "valid_from")
    assert "missing" in problem(await post(operator, "/prices", {**form, "output": ""}), "output")


async def test_objectives_are_made_switched_off_and_removed(operator: Deployment) -> None:
    form = {"tenant": "acme", "service_class": "fast", "ttft_ms": "500", "ttft_share": "95", "window_days": "7"}
    assert (await post(operator, "/slos", form)).status_code == 303
    async with transaction(operator.app.state.resources.engine) as session:
        slo = (await slo_service.list_slos(session, tenant="acme")).items[0]
    assert (slo.ttft_ms, slo.ttft_share, slo.service_class, slo.window_days) == (500, 0.95, "fast", 7)
    page = (await operator.client.get("/slos")).text
    assert "for 95 %" in page
    assert (await post(operator, f"/slos/{slo.id}/disable")).status_code == 303
    assert "Disabled" in (await operator.client.get("/slos")).text
    assert (await post(operator, f"/slos/{slo.id}/enable")).status_code == 303
    for change, field, sentence in (
        ({"ttft_share": "100"}, "ttft_share", "below 1"),
        ({"ttft_share": "0.9"}, "ttft_share", "type 90 for a share of 0.9, or 0.9% for as little"),
        ({"availability": "0.999"}, "availability", "type 99.9 for a share of 0.999"),
        ({"ttft_share": ""}, "ttft_share", "missing"),
        ({"service_class": "Not One"}, "service_class", "lower-case"),
        ({"tenant": "nobody"}, "tenant", "no tenant nobody"),
        ({"tpot_ms": "fast"}, "tpot_ms", "must be a number"),
    ):
        assert sentence in problem(await post(operator, "/slos", {**form, **change}), field)
    assert (await post(operator, "/slos", form)).status_code == 422
    assert (await post(operator, "/slos", {**form, "pool": "own", "ttft_share": "0.5 %"})).status_code == 303
    async with transaction(operator.app.state.resources.engine) as session:
        (little,) = [one for one in (await slo_service.list_slos(session, tenant="acme")).items if one.pool == "own"]
    assert little.ttft_share == 0.005
    assert (await post(operator, f"/slos/{little.id}/delete")).status_code == 303
    assert (await post(operator, f"/slos/{slo.id}/delete")).status_code == 303
    assert "Disable" not in (await operator.client.get("/slos")).text


async def test_htmx_is_told_where_to_go_after_a_change(operator: Deployment) -> None:
    quota = await made(operator)
    token = await csrf_of(operator.client, "/tenants")
    form = {"_csrf_token": token, "hard": "7", "away": "closed"}
    answer = await operator.client.post(f"/quotas/{quota.id}", data=form, headers=HTMX)
    assert answer.headers["hx-redirect"] == f"/quotas/{quota.id}"


async def test_what_is_not_there_is_a_page_not_found(operator: Deployment) -> None:
    for path in ("/tenants/nobody/quotas", "/quotas/00000000-0000-0000-0000-000000000000", "/quotas/junk"):
        assert (await operator.client.get(path)).status_code == 404
    assert (await post(operator, "/tenants/nobody/quotas", {"kind": "tokens_per_day", "hard": "1"})).status_code == 404


async def test_f31_a_list_page_costs_the_same_however_long_it_is(operator: Deployment) -> None:
    quota = await made(operator)
    engine = operator.app.state.resources.engine

    async def mine(path: str) -> int:
        with counted_queries(engine) as statements:
            assert (await operator.client.get(path)).status_code == 200
        tables = ("quota", "prices", "slos", "tenants")
        return len([each for each in statements if any(f"FROM {name}" in each for name in tables)])

    paths = ("/quotas", f"/tenants/{quota.tenant}/quotas", "/prices", "/slos")
    before = {path: await mine(path) for path in paths}
    async with transaction(engine) as session:
        for number in range(30):
            await service.create_quota(
                session, quota.tenant, QuotaSpec(kind=QuotaKind.TOKENS_PER_DAY, hard=1, model=f"m{number}")
            )
            await request_service.ask(
                session, quota.tenant, QuotaRequestSpec(amount=1, reason="x", quota_id=quota.id), by="k"
            )
    assert {path: await mine(path) for path in paths} == before
    assert max(before.values()) <= 3


async def test_a_wish_for_a_while_offers_what_is_missing_beside_raises(operator: Deployment) -> None:
    quota = await made(operator)
    assert quota.hard is not None
    until = datetime.now(UTC) + timedelta(days=2)
    async with transaction(operator.app.state.resources.engine) as session:
        key = (await create_key(session, tenant_slug=quota.tenant, name="asks")).view
        tenant = await get_tenant(session, quota.tenant)
        asker = Asker(tenant_id=tenant.id, project=key.project, identity=key.identity, key_id=key.key_id)
        wish = MoreSpec(quota_id=quota.id, hard=quota.hard + 100, reason="launch", until=until)
        asked = await request_service.ask_with_key(session, asker, wish)
        raised = GrantSpec(amount=60, expires_at=until + timedelta(days=1), reason="first part")
        await service.grant(session, quota.id, raised, by="op")
    page = (await operator.client.get(f"/quota-requests/{asked.id}")).text
    (field,) = re.findall(r'<input[^>]*name="amount"[^>]*>', page)
    assert 'value="40"' in field
