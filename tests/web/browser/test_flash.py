"""What the page after a change says, in a browser: with and without scripts, for everybody, on a phone, once."""

from __future__ import annotations

import uuid

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.web.browser.conftest import DESKTOP, PHONE, OpenPage, Site
from tests.web.browser.test_access import violations

pytestmark = pytest.mark.browser

WATCH = """(() => {
  window.announced = [];
  const watched = new MutationObserver(changes => {
    if (document.readyState !== "complete") return;
    for (const change of changes) for (const node of change.addedNodes)
      if (node.matches?.("#toaster[aria-live=polite] > [role=status]"))
        window.announced.push(node.querySelector("h2").textContent);
  });
  watched.observe(document, { childList: true, subtree: true });
})();"""
"""Notes what the live region is given once the page is there: only of that are readers of the screen told."""

STANDS = """(() => {
  const { setTimeout } = window;
  window.setTimeout = (call, ms, ...rest) => ms === 5000 ? 0 : setTimeout(call, ms, ...rest);
})();"""
"""No toast goes away, however slow the machine is that looks at it."""


def tenant(admin: httpx.Client, slug: str = "", name: str = "Flash Ltd") -> str:
    slug = slug or f"f-{uuid.uuid4().hex[:8]}"
    admin.post("/api/v1/tenants", json={"slug": slug, "name": name}).raise_for_status()
    return slug


def set_limit(page: Page, slug: str, hard: str = "100") -> None:
    page.goto(f"/tenants/{slug}/quotas")
    page.get_by_text("New limit").click()
    page.get_by_label("What is limited").select_option("requests_per_minute")
    page.get_by_label("Hard limit").fill(hard)
    page.get_by_role("button", name="Create limit").click()


def test_a_change_is_announced_once_leaves_the_focus_alone_and_goes_away(as_operator: OpenPage, site: Site) -> None:
    with site.admin() as admin:
        slug = tenant(admin)
    words = f"Limit set: 100 requests a minute for {slug}"
    page = as_operator()
    page.clock.install()
    page.add_init_script(WATCH)
    set_limit(page, slug)
    toast = page.get_by_role("status").filter(has_text=words)
    expect(toast).to_be_visible()
    page.wait_for_function("words => window.announced.includes(words)", arg=words)
    assert page.evaluate("window.announced") == [words]
    expect(page.locator("body")).to_be_focused()
    expect(page.locator("#quota-list")).to_contain_text("100")
    page.clock.run_for(6000)
    expect(page.locator(".toast")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.wait_for_load_state("load")
    expect(page.locator(".toast")).to_have_count(0)
    assert page.evaluate("window.announced") == []


def test_a_reload_while_it_stands_shows_it_no_more(as_operator: OpenPage, site: Site) -> None:
    with site.admin() as admin:
        slug = tenant(admin)
    page = as_operator()
    page.add_init_script(STANDS)
    set_limit(page, slug)
    expect(page.locator(".toast")).to_be_visible()
    page.reload()
    page.wait_for_load_state("load")
    expect(page.locator(".toast")).to_have_count(0)


def test_a_refused_form_shows_no_toast(as_operator: OpenPage, site: Site) -> None:
    with site.admin() as admin:
        slug = tenant(admin)
    page = as_operator()
    set_limit(page, slug, hard="many")
    expect(page.locator(".field-error")).to_be_visible()
    expect(page.locator(".toast")).to_have_count(0)


@pytest.mark.parametrize(("theme", "viewport"), [("light", PHONE), ("dark", PHONE), ("dark", DESKTOP)])
def test_the_longest_words_violate_no_wcag_aa_nor_scroll_sideways(
    as_operator: OpenPage, site: Site, theme: str, viewport: dict[str, int]
) -> None:
    slug = uuid.uuid4().hex.ljust(40, "w")
    with site.admin() as admin:
        tenant(admin, slug, "W" * 200)
    page = as_operator(theme=theme, viewport=viewport)
    page.add_init_script(STANDS)
    set_limit(page, slug, hard="1" * 15)
    fits(page, slug)
    page.goto(f"/tenants/{slug}")
    page.get_by_role("button", name="Deactivate").click()
    page.get_by_role("dialog").get_by_role("button", name="Deactivate").click()
    fits(page, "Tenant deactivated: WWW")
    assert violations(page) == []


def fits(page: Page, words: str) -> None:
    """The toast with these words has come to rest, and neither it nor the page reaches beyond the window."""
    toast = page.locator(".toast")
    expect(toast).to_contain_text(words)
    page.evaluate("async () => { await Promise.allSettled(document.getAnimations().map(each => each.finished)); }")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert toast.evaluate("each => each.getBoundingClientRect().left >= 0")
    assert toast.evaluate("each => each.getBoundingClientRect().right <= innerWidth")
    assert toast.locator("h2").evaluate("each => each.scrollWidth <= each.clientWidth")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_without_scripts_it_stays_for_one_page_and_hides_nothing_for_good(
    as_operator: OpenPage, site: Site, viewport: dict[str, int]
) -> None:
    with site.admin() as admin:
        slug = tenant(admin)
        for number in range(12):
            spec = {"kind": "tokens_per_day", "hard": 1000, "model": f"model-{number}"}
            admin.post(f"/api/v1/tenants/{slug}/quotas", json=spec).raise_for_status()
    page = as_operator(viewport=viewport, scripts=False)
    set_limit(page, slug)
    toast = page.locator(".toast")
    expect(toast).to_contain_text(f"Limit set: 100 requests a minute for {slug}")
    expect(toast).to_be_visible()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    below, above = page.locator("#quota-list").bounding_box(), toast.bounding_box()
    assert below is not None and above is not None
    assert below["y"] + below["height"] <= above["y"]
    page.goto(f"/tenants/{slug}/quotas")
    expect(page.locator("#quota-list")).to_contain_text("100")
    expect(toast).to_have_count(0)


def test_a_role_set_and_a_tenant_deactivated_by_plain_forms_are_told(as_operator: OpenPage, site: Site) -> None:
    with site.admin() as admin:
        slug = tenant(admin)
        body = {"kind": "service_account", "name": "bot", "role": "member"}
        admin.post(f"/api/v1/tenants/{slug}/principals", json=body).raise_for_status()
    page = as_operator()
    page.add_init_script(STANDS)
    page.goto(f"/tenants/{slug}/principals")
    page.get_by_role("combobox", name="Role of bot").select_option("viewer")
    page.get_by_role("button", name="Set role of bot").click()
    expect(page.locator(".toast")).to_contain_text(f"Role set: bot of {slug} is viewer")
    page.get_by_role("button", name="Deactivate", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Deactivate").click()
    expect(page.locator(".toast")).to_contain_text("Tenant deactivated: Flash Ltd")
    expect(page.locator(".toast")).to_have_count(1)
