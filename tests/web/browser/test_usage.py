"""Usage in a browser: read by everybody, downloaded by a link, on a phone, light and dark."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from dataplane.protocol import encode
from tests.controlplane.telemetry.reports import gateway_report, report, usage
from tests.web.browser.conftest import PHONE, OpenPage, Site
from tests.web.browser.test_access import violations
from tests.web.samples import MODEL, POOL

pytestmark = pytest.mark.browser


def tenant_with_usage(site: Site) -> str:
    """A tenant whose attempts a replica has just told; its slug."""
    slug, now = f"u-{uuid.uuid4().hex[:8]}", time.time()
    with site.admin() as admin:
        admin.post("/api/v1/tenants", json={"slug": slug, "name": f"Usage {slug}"}).raise_for_status()
    records = [
        usage(
            f"{slug}-{n}", tenant=slug, pool=POOL, model=MODEL, replica=slug, project="default", key_id=f"key{n}",
            started_at=now - 1, finished_at=now, device_seconds=0.5,
        )
        for n in range(3)
    ]  # fmt: skip
    told = report(replica=slug, pool=POOL, model=MODEL, boot_epoch=1, sequence=1, sent_at=now, usage=records)
    spool = gateway_report([], gateway=slug, sent_at=now, spool_bytes=4321, spool_oldest_at=now - 5)
    headers = {"authorization": f"Bearer {site.internal_token}", "content-type": "application/msgpack"}
    with httpx.Client(base_url=site.url, headers=headers) as client:
        client.post("/internal/v1/reports", content=encode(told)).raise_for_status()
        client.post("/internal/v1/gateway-reports", content=encode(spool)).raise_for_status()
    return slug


def test_a_viewer_reads_a_statement_and_downloads_its_rows(as_viewer: OpenPage, site: Site, tmp_path: Path) -> None:
    slug = tenant_with_usage(site)
    month = f"{datetime.now(UTC):%Y-%m}"
    page = as_viewer()
    page.goto("/usage")
    page.get_by_role("link", name=slug).click()
    page.wait_for_url(f"**/tenants/{slug}/usage?month={month}")
    expect(page.get_by_role("navigation", name=f"Usage {slug}").get_by_role("link", name="Usage")).to_have_attribute(
        "aria-current", "page"
    )
    expect(page.locator("#statement-total")).to_contain_text("3 attempts")
    expect(page.locator("#usage-lines-body tr")).to_have_count(3)
    with page.expect_download() as download:
        page.get_by_role("link", name="Attempts as CSV").click()
    target = tmp_path / download.value.suggested_filename
    download.value.save_as(target)
    assert target.name == f"usage-{slug}-{month}.csv"
    assert len(target.read_text().splitlines()) == 4


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_violates_wcag_aa_nor_scrolls_sideways_on_a_phone(
    as_operator: OpenPage, site: Site, theme: str
) -> None:
    slug = tenant_with_usage(site)
    for viewport in (None, PHONE):
        page = as_operator(theme=theme, **({"viewport": viewport} if viewport else {}))
        for path in ("/usage", "/usage/arriving", f"/tenants/{slug}/usage"):
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.locator("tbody tr:not(.empty-row)").first).to_be_visible()
            assert violations(page) == [], path
            if viewport:
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
                cut = "tables => tables.filter(each => each.scrollWidth > each.clientWidth).map(each => each.ariaLabel)"
                assert page.locator(".table-container:has(.stacked)").evaluate_all(cut) == [], path
