"""Everybody can use the console: no WCAG A/AA violation, all by keyboard, on a phone, in both themes."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.web.browser.conftest import PHONE, OpenPage, Reporters, Site
from tests.web.samples import Reporter

pytestmark = pytest.mark.browser

RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}}
TENANT_PAGES = [
    "/tenants/acme",
    "/tenants/acme/change",
    "/tenants/acme/projects",
    "/tenants/acme/projects/default/change",
    "/tenants/acme/principals",
]
PAGES = ["/", "/replicas", "/tenants", *TENANT_PAGES, "/nowhere"]


@pytest.fixture
def reporter(reporters: Reporters) -> Reporter:
    """Pages with something to show."""
    reporter = reporters("axe-1")
    reporter.serve(ttft=0.2, engine_ttft=0.1, tpot=0.03, requests=4)
    reporter.report(running=2)
    return reporter


def violations(page: Page) -> list[str]:
    found = Axe().run(page, options=RULES).response["violations"]
    return [
        f"{each['id']}: {node['html'][:160]} {node['failureSummary'][:300]}" for each in found for node in each["nodes"]
    ]


def faded_in(page: Page) -> None:
    """The open dialog and its backdrop have their final colours and place; contrast is judged then."""
    expect(page.get_by_role("dialog")).to_have_css("opacity", "1")
    page.evaluate("async () => { await Promise.allSettled(document.getAnimations().map(each => each.finished)); }")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_violates_wcag_aa(as_operator: OpenPage, open_page: OpenPage, reporter: Reporter, theme: str) -> None:
    page = as_operator(theme=theme)
    for path in PAGES:
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        if path == "/":
            expect(page.locator("figure.trend canvas").first).to_be_visible()
            page.locator("figure.trend summary").first.click()
        assert page.evaluate("document.documentElement.classList.contains('dark')") == (theme == "dark")
        assert violations(page) == [], path
    stranger = open_page(theme=theme)
    stranger.goto("/login")
    assert violations(stranger) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_dialog_or_form_state_violates_wcag_aa(as_operator: OpenPage, theme: str) -> None:
    page = as_operator(theme=theme)
    page.goto("/tenants")
    page.get_by_text("New tenant").click()
    expect(page.get_by_label("Slug")).to_be_focused()
    page.get_by_label("Slug").fill("NOT")
    page.get_by_label("Name").fill("x")
    page.get_by_role("button", name="Create tenant").click()
    expect(page.locator(".field-error")).to_be_visible()
    expect(page.get_by_label("Slug")).to_be_focused()
    assert violations(page) == []
    page.goto("/tenants/acme")
    page.get_by_label("Name").fill(f"axe {theme}")
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("#created-key")).to_be_focused()
    assert violations(page) == []
    page.get_by_role("button", name=f"Revoke axe {theme}").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    faded_in(page)
    assert violations(page) == []
    page.get_by_role("button", name="Revoke key").click()
    expect(page.locator(".toast")).to_be_visible()
    page.goto("/tenants/acme")
    page.get_by_label("Name").fill(f"turn {theme}")
    page.get_by_role("button", name="Create key").click()
    page.get_by_role("button", name=f"Rotate turn {theme}").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    faded_in(page)
    assert violations(page) == []
    page.goto("/tenants/acme/principals")
    page.get_by_text("New person or service account").click()
    page.get_by_label("Name").fill(f"bot {theme}")
    page.get_by_label("Email").fill("not an address")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_text("Email must be an e-mail address.")).to_be_visible()
    assert violations(page) == []
    page.get_by_label("Email").fill("")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("combobox", name=f"Role of bot {theme}")).to_be_visible()
    assert violations(page) == []


def test_stale_figures_keep_their_contrast(as_operator: OpenPage, reporter: Reporter, site: Site) -> None:
    page = as_operator()
    page.goto("/")
    expect(page.locator("figure.trend canvas").first).to_be_visible()
    site.postgres.cut()
    try:
        expect(page.locator("#freshness")).to_contain_text("does not answer", timeout=40_000)
        assert violations(page) == []
    finally:
        site.postgres.mend()
    expect(page.locator("#freshness")).not_to_contain_text("does not answer", timeout=40_000)


def test_the_keyboard_alone_reaches_everything(as_operator: OpenPage, reporter: Reporter) -> None:
    page = as_operator()
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        focus = page.evaluate(
            """() => {
              const node = document.activeElement;
              const style = getComputedStyle(node);
              const visible = style.outlineStyle !== 'none' || style.boxShadow !== 'none';
              return [node.id || node.textContent.trim().slice(0, 30), visible];
            }"""
        )
        reached.append(focus)
        if focus[0].startswith("overview-tenant-"):
            break
    names = [name for name, _ in reached]
    assert [name for name, visible in reached if not visible and name] == []
    assert "window-60" in names
    assert any(name.startswith("Points as a table") for name in names)
    assert any(name.startswith("overview-replica-") for name in names)
    assert any(name.startswith("overview-tenant-") for name in names)
    page.locator("#window-60").press("Enter")
    expect(page.locator("#window-60")).to_have_attribute("aria-current", "true")
    expect(page.locator("#window-60")).to_be_focused()


def test_a_tenant_and_key_are_made_by_keyboard_alone(as_operator: OpenPage) -> None:
    page = as_operator()
    page.goto("/tenants")
    page.locator("#create-tenant-summary").press("Enter")
    expect(page.get_by_label("Slug")).to_be_focused()
    page.keyboard.type("keys-only")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Name")).to_be_focused()
    page.keyboard.type("Keys Only")
    page.keyboard.press("Enter")
    page.wait_for_url("**/tenants/keys-only")
    page.get_by_label("Name").focus()
    expect(page.get_by_label("Name")).to_be_focused()
    page.keyboard.type("first")
    page.keyboard.press("Enter")
    expect(page.locator("#created-key")).to_be_focused()


def test_only_the_reader_moves_the_focus_into_the_form(as_operator: OpenPage) -> None:
    page = as_operator()
    page.goto("/tenants")
    summary, slug = page.locator("#create-tenant-summary"), page.get_by_label("Slug")
    summary.click()
    expect(slug).to_be_focused()
    summary.click()
    expect(slug).to_be_hidden()
    expect(summary).to_be_focused()
    toggled = """details => new Promise(resolve => {
      details.addEventListener("toggle", () => setTimeout(resolve), { once: true });
      details.open = true;
    })"""
    page.locator("#create-tenant").evaluate(toggled)
    expect(slug).to_be_visible()
    expect(summary).to_be_focused()


def test_what_a_disclosure_shows_can_take_the_focus_at_once(as_operator: OpenPage) -> None:
    page = as_operator()
    page.goto("/tenants")
    focused = """details => {
      details.open = true;
      details.querySelector("[name=slug]").focus();
      return document.activeElement.name;
    }"""
    assert page.locator("#create-tenant").evaluate(focused) == "slug"


def test_a_form_refused_without_scripts_is_open_and_leaves_the_focus(as_operator: OpenPage) -> None:
    page = as_operator()
    page.goto("/tenants")
    page.locator("#create-tenant form").evaluate(
        """form => {
          form.elements.slug.value = 'Not A Slug';
          form.elements.name.value = 'x';
          form.submit();
        }"""
    )
    expect(page.get_by_label("Slug")).to_have_attribute("aria-invalid", "true")
    page.wait_for_load_state("load")
    expect(page.locator("body")).to_be_focused()


def test_a_refused_form_takes_the_focus_to_its_field_and_keeps_the_policy(as_operator: OpenPage) -> None:
    page = as_operator()
    for path, button, field, value in (
        ("/tenants", "Create tenant", "Slug", "Not A Slug"),
        ("/tenants/acme", "Create key", "Name", " "),
    ):
        page.goto(path)
        if path == "/tenants":
            page.get_by_text("New tenant").click()
            expect(page.get_by_label("Slug")).to_be_focused()
        page.get_by_label("Name").fill("x")
        page.get_by_label(field).fill(value)
        # As extensions that fill in passwords do: they leave style attributes behind, which the policy lets nobody set.
        page.locator("main input").evaluate_all("all => all.forEach(each => { each.style.color = 'red'; })")
        page.get_by_role("button", name=button).click()
        expect(page.get_by_label(field)).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_label(field)).to_be_focused()


def test_a_phone_shows_everything_without_scrolling_sideways(as_operator: OpenPage, reporter: Reporter) -> None:
    page = as_operator(viewport=PHONE)
    for path in [*PAGES, "/login"]:
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        if path == "/":
            expect(page.locator("figure.trend canvas").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    page.goto("/")
    menu = page.get_by_role("button", name="Menu")
    expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    menu.click()
    expect(menu).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    expect(menu).to_be_focused()
    menu.click()
    page.get_by_role("link", name="Tenants and keys").click()
    page.wait_for_url("**/tenants")
    expect(page.get_by_role("heading", level=1)).to_have_text("Tenants and keys")
    assert violations(page) == []


def test_a_phone_shows_whole_rows_one_under_the_other_and_they_stay_table_rows(
    as_operator: OpenPage, reporter: Reporter, site: Site
) -> None:
    with site.admin() as admin:
        admin.post("/api/v1/tenants/acme/keys", json={"name": "on a phone"}).raise_for_status()
    page = as_operator(viewport=PHONE)
    for path, cells in (("/", 10), ("/tenants", 5), ("/tenants/acme", 8), ("/tenants/acme/projects", 6)):
        page.goto(path)
        table = page.locator("table.stacked").first
        expect(table.locator("tbody tr:not(.empty-row)").first).to_be_visible()
        cut = "tables => tables.filter(each => each.scrollWidth > each.clientWidth).map(each => each.ariaLabel)"
        assert page.locator(".table-container:has(.stacked)").evaluate_all(cut) == [], path
        nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
        assert roles.count("row") >= 2, path
        assert roles.count("cell") + roles.count("rowheader") >= cells, path
    page.goto("/tenants/acme")
    revoke = page.get_by_role("button", name="Revoke on a phone")
    box = revoke.bounding_box()
    assert box
    assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE["width"]
    expires = page.locator("tr", has=revoke).locator("[data-label=Expires]")
    assert expires.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Expires"'
    revoke.click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()


@pytest.mark.parametrize("width", [390, 900, 1024, 1280, 1360, 1440])
def test_no_tile_of_the_overview_is_left_alone_and_no_time_is_cut(
    as_operator: OpenPage, reporter: Reporter, width: int
) -> None:
    page = as_operator(viewport={"width": width, "height": 800})
    page.goto("/?window=60")
    expect(page.locator("figure.trend canvas").first).to_be_visible()
    for tiles in (".stats > *", ".outcomes > *"):
        boxes, inner = page.evaluate(
            """tiles => {
              const all = [...document.querySelectorAll(tiles)], list = all[0].parentElement;
              const inner = list.getBoundingClientRect().right - parseFloat(getComputedStyle(list).paddingRight);
              return [all.map(each => each.getBoundingClientRect().toJSON()), inner];
            }""",
            tiles,
        )
        for top in {round(box["top"]) for box in boxes}:
            assert max(box["right"] for box in boxes if round(box["top"]) == top) == pytest.approx(inner, abs=1), tiles
    room = page.locator("figure.trend .u-over").first.evaluate(
        "plot => plot.closest('.uplot').getBoundingClientRect().right - plot.getBoundingClientRect().right"
    )
    widest = page.evaluate(
        """() => {
          const pen = document.createElement("canvas").getContext("2d");
          pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
          return pen.measureText("12:31:00 AM").width;
        }"""
    )
    assert room >= widest / 2


def test_a_dialog_on_a_phone_has_buttons_as_wide_as_itself(as_operator: OpenPage) -> None:
    page = as_operator(viewport=PHONE)
    page.goto("/tenants/acme")
    page.get_by_role("button", name="Deactivate").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    faded_in(page)
    outer = dialog.locator("> div").bounding_box()
    cancel, confirm = (dialog.get_by_role("button", name=name).bounding_box() for name in ("Cancel", "Deactivate"))
    assert outer and cancel and confirm
    assert confirm["x"] == pytest.approx(cancel["x"], abs=1)
    assert confirm["width"] == pytest.approx(cancel["width"], abs=1)
    assert outer["x"] < cancel["x"]
    assert cancel["x"] + cancel["width"] < outer["x"] + outer["width"] <= PHONE["width"]


def test_the_theme_is_chosen_remembered_and_follows_the_system(as_operator: OpenPage) -> None:
    page = as_operator(theme="light")
    page.goto("/tenants")
    root = page.locator("html")
    dark = re.compile(r"\bdark\b")
    expect(root).not_to_have_class(dark)
    page.get_by_role("button", name="Dark").click()
    expect(root).to_have_class(dark)
    expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "true")
    page.goto("/replicas")
    expect(root).to_have_class(dark)
    page.get_by_role("button", name="As the system").click()
    expect(root).not_to_have_class(dark)
    page.emulate_media(color_scheme="dark")
    expect(root).to_have_class(dark)
