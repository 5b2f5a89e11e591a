"""Quotas, prices and objectives in a browser: made, changed, raised; for everybody, by keyboard, on a phone."""

from __future__ import annotations

import uuid

import httpx
import pytest
from playwright.sync_api import expect

from tests.web.browser.conftest import PHONE, OpenPage, Site
from tests.web.browser.test_access import violations

pytestmark = pytest.mark.browser


def tenant_with_request(admin: httpx.Client) -> tuple[str, str]:
    """A tenant with a limit it asks more of; its slug and the limit's id."""
    slug = f"q-{uuid.uuid4().hex[:8]}"
    admin.post("/api/v1/tenants", json={"slug": slug, "name": f"Quota {slug}"}).raise_for_status()
    quota = admin.post(f"/api/v1/tenants/{slug}/quotas", json={"kind": "tokens_per_day", "hard": 1000})
    quota_id = quota.raise_for_status().json()["id"]
    asked = {"quota_id": quota_id, "amount": 500, "reason": "growth"}
    admin.post(f"/api/v1/tenants/{slug}/quota-requests", json=asked).raise_for_status()
    raised = {"amount": 5, "expires_at": "2027-01-01T00:00:00Z", "reason": "launch"}
    admin.post(f"/api/v1/quotas/{quota_id}/grants", json=raised)
    return slug, quota_id


def test_a_limit_is_made_changed_and_raised_and_a_request_approved(as_operator: OpenPage, site: Site) -> None:
    with site.admin() as admin:
        slug, _ = tenant_with_request(admin)
        page = as_operator()
        page.goto("/quotas")
        page.get_by_role("button", name=f"Approve tokens per day for {slug}").click()
        expect(page.get_by_role("button", name=f"Approve tokens per day for {slug}")).to_have_count(0)
        page.get_by_role("link", name=f"Quota {slug}").click()
        page.wait_for_url(f"**/tenants/{slug}/quotas")
        expect(page.locator("#quota-list")).to_contain_text("1,500")
        page.get_by_text("New limit").click()
        expect(page.get_by_label("What is limited")).to_be_focused()
        page.get_by_label("What is limited").select_option("requests_per_minute")
        page.get_by_role("button", name="Create limit").click()
        expect(page.get_by_text("A quota needs a hard limit")).to_be_visible()
        expect(page.get_by_label("Hard limit")).to_be_focused()
        expect(page.get_by_label("What is limited")).to_have_value("requests_per_minute")
        assert violations(page) == []
        page.get_by_label("Hard limit").fill("60")
        page.get_by_role("button", name="Create limit").click()
        page.get_by_role("link", name="Requests per minute").click()
        page.get_by_label("Hard limit").fill("90")
        page.get_by_role("button", name="Change limit").click()
        expect(page.locator(".facts")).to_contain_text("90")
        page.get_by_label("By how much").fill("10")
        page.get_by_label("Until").fill("2027-02-01T12:00")
        page.get_by_label("Reason").fill("launch week")
        page.get_by_role("button", name="Raise limit").click()
        expect(page.locator("#grants")).to_contain_text("launch week")
        page.get_by_role("button", name="Remove limit").click()
        page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        page.wait_for_url(f"**/tenants/{slug}/quotas")
        kinds = [row["kind"] for row in admin.get(f"/api/v1/tenants/{slug}/quotas").json()["items"]]
    assert kinds == ["tokens_per_day"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_violates_wcag_aa_nor_scrolls_sideways_on_a_phone(
    as_operator: OpenPage, site: Site, theme: str
) -> None:
    with site.admin() as admin:
        slug, quota_id = tenant_with_request(admin)
        price = {"pool": slug, "uncached_input": 1, "cached_input": 1, "output": 1}
        admin.post("/api/v1/prices", json=price).raise_for_status()
        admin.post("/api/v1/prices", json={**price, "valid_from": "2999-01-01T00:00:00Z"}).raise_for_status()
        slo = {"tenant": slug, "ttft_ms": 500, "ttft_share": 0.95, "availability": 0.999}
        admin.post("/api/v1/slos", json=slo).raise_for_status()
        asked = admin.get("/api/v1/quota-requests", params={"tenant": slug}).json()["items"][0]["id"]
    paths = ("/quotas", f"/tenants/{slug}/quotas", f"/quotas/{quota_id}", "/prices", "/slos", "/policy")
    for viewport in (None, PHONE):
        page = as_operator(theme=theme, **({"viewport": viewport} if viewport else {}))
        for path in (*paths, f"/quota-requests/{asked}"):
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            if path in paths:
                expect(page.locator("tbody tr:not(.empty-row)").first).to_be_visible()
            for summary in page.locator("main summary").all():
                summary.click()
            assert violations(page) == [], path
            if viewport:
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
                cut = "tables => tables.filter(each => each.scrollWidth > each.clientWidth).map(each => each.ariaLabel)"
                assert page.locator(".table-container:has(.stacked)").evaluate_all(cut) == [], path


def test_a_viewer_finds_nothing_to_press(as_viewer: OpenPage, site: Site) -> None:
    with site.admin() as admin:
        slug, quota_id = tenant_with_request(admin)
    page = as_viewer()
    for path in ("/quotas", f"/tenants/{slug}/quotas", f"/quotas/{quota_id}", "/prices", "/slos", "/policy"):
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert page.locator("main form").count() == 0
        assert page.locator("main button").count() == 0


def test_f17_a_change_is_rolled_back_with_the_keyboard_and_waiting_requests_stand_in_the_menu(
    as_operator: OpenPage, site: Site
) -> None:
    with site.admin() as admin:
        _, quota_id = tenant_with_request(admin)
        admin.patch(f"/api/v1/quotas/{quota_id}", json={"hard": 7}).raise_for_status()
        page = as_operator()
        page.goto("/policy")
        expect(page.locator(".nav-count")).to_be_visible()
        row = page.locator("tr", has_text="hard: 1,000 → 7").first
        row.get_by_role("button", name="Roll back").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr", has_text="takes back change").first).to_be_visible()
        assert admin.get(f"/api/v1/quotas/{quota_id}").json()["hard"] == 1000
