"""Tenants and keys in a browser: create, show once, copy, revoke, deactivate; a viewer only looks."""

from __future__ import annotations

import re
import uuid

import pytest
from playwright.sync_api import expect

from tests.web.browser.conftest import OpenPage, Site

pytestmark = pytest.mark.browser


def test_create_a_tenant_and_a_key_use_it_and_revoke_it(as_operator: OpenPage, site: Site) -> None:
    slug = f"t-{uuid.uuid4().hex[:8]}"
    page = as_operator()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto("/tenants")
    page.get_by_text("New tenant").click()
    expect(page.get_by_label("Slug")).to_be_focused()
    page.get_by_label("Slug").fill("Not A Slug")
    page.get_by_label("Name").fill("Blue Ltd")
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_text("Slug must be 1 to 40 lower-case letters")).to_be_visible()
    expect(page.get_by_label("Slug")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Slug")).to_be_focused()
    page.get_by_label("Slug").fill(slug)
    page.get_by_role("button", name="Create tenant").click()
    page.wait_for_url(f"**/tenants/{slug}")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Blue Ltd")
    expect(page.get_by_text("No key yet")).to_be_visible()

    page.get_by_label("Name").fill("billing")
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("#created-key")).to_be_focused()
    plain = page.locator("#plain-key").inner_text()
    assert re.fullmatch(r"tg_[0-9A-Za-z]{11}_[0-9A-Za-z]{49}", plain)
    page.get_by_role("button", name="Copy key").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == plain
    assert f"Bearer {plain}" in page.locator("#curl-snippet").inner_text()
    stored = page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
    assert plain not in stored

    page.get_by_role("button", name="Revoke billing").click()
    dialog = page.get_by_role("dialog", name="Revoke “billing”?")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Revoke key")).to_have_count(0)
    expect(page.get_by_role("button", name="Revoke billing")).to_be_focused()
    page.get_by_role("button", name="Revoke billing").click()
    dialog.get_by_role("button", name="Revoke key").click()
    expect(page.locator("#keys")).to_contain_text("Revoked")
    expect(page.get_by_role("button", name="Revoke billing")).to_have_count(0)
    expect(page.locator(".toast")).to_contain_text("Revoked “billing”")
    with site.admin() as admin:
        keys = admin.get(f"/api/v1/tenants/{slug}/keys").json()["items"]
    assert [key["revoked_at"] is not None for key in keys] == [True]
    page.reload()
    assert plain not in page.content()


def test_f10_rotate_a_key_whose_replacement_is_shown_once_in_the_place_of_new_ones(
    as_operator: OpenPage, site: Site
) -> None:
    slug = f"t-{uuid.uuid4().hex[:8]}"
    with site.admin() as admin:
        admin.post("/api/v1/tenants", json={"slug": slug, "name": "Turning Ltd"}).raise_for_status()
        admin.post(f"/api/v1/tenants/{slug}/keys", json={"name": "billing"}).raise_for_status()
    page = as_operator()
    page.goto(f"/tenants/{slug}")
    page.get_by_role("button", name="Rotate billing").click()
    dialog = page.get_by_role("dialog", name="Rotate “billing”?")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    expect(dialog.get_by_label("The old key stays valid for")).to_have_value("86400")
    dialog.get_by_label("The old key stays valid for").select_option("1 hour")
    dialog.get_by_role("button", name="Rotate key").click()
    expect(page.locator("#created-key")).to_be_focused()
    expect(page.locator("#created-key")).to_contain_text("The key it replaces stays valid until")
    plain = page.locator("#plain-key").inner_text()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("#keys tbody tr")).to_have_count(2)
    expect(page.locator("#keys tbody tr").first).to_contain_text("Replaced")
    expect(page.get_by_role("button", name="Rotate billing")).to_have_count(1)
    with site.admin() as admin:
        old, new = admin.get(f"/api/v1/tenants/{slug}/keys").json()["items"]
    assert old["rotated_to"] == new["key_id"] == plain.split("_")[1]
    assert new["identity"] == old["identity"]
    page.reload()
    assert plain not in page.content()


def test_projects_and_owners_are_made_and_a_key_is_theirs(as_operator: OpenPage, site: Site) -> None:
    slug = f"t-{uuid.uuid4().hex[:8]}"
    with site.admin() as admin:
        admin.post("/api/v1/tenants", json={"slug": slug, "name": "Tree Ltd"}).raise_for_status()
    page = as_operator()
    page.goto(f"/tenants/{slug}")
    page.get_by_role("link", name="Projects").click()
    page.wait_for_url("**/projects")
    page.get_by_text("New project").click()
    expect(page.get_by_label("Slug")).to_be_focused()
    page.get_by_label("Slug").fill("default")
    page.get_by_label("Name").fill("Search")
    page.get_by_role("button", name="Create project").click()
    expect(page.get_by_text("has a project default already")).to_be_visible()
    expect(page.get_by_label("Slug")).to_be_focused()
    page.get_by_label("Slug").fill("search")
    page.get_by_role("button", name="Create project").click()
    expect(page.locator("#project-search")).to_contain_text("Active")

    page.get_by_role("link", name="People and services").click()
    expect(page.get_by_text("Nobody yet")).to_be_visible()
    page.get_by_text("New person or service account").click()
    page.get_by_label("Name").fill("Ada")
    page.get_by_label("Email").fill("ada@example.com")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("rowheader", name="Ada")).to_be_visible()

    page.get_by_role("link", name="Keys", exact=True).click()
    page.get_by_label("Name").fill("theirs")
    page.get_by_label("Project").select_option("Search")
    page.get_by_label("Owner").select_option("Ada (member)")
    page.get_by_label("Expires").fill("2999-01-01")
    page.get_by_label("inference").uncheck()
    page.get_by_label("admin").check()
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_text("A key of a member may not have admin.")).to_be_visible()
    expect(page.get_by_label("Owner")).to_have_value(re.compile("[0-9a-f-]{36}"))
    expect(page.get_by_label("admin")).to_be_checked()
    page.get_by_label("admin").uncheck()
    page.get_by_label("usage:read").check()
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("#created-key")).to_be_focused()
    expect(page.locator("#curl-snippet")).to_have_count(0)
    row = page.locator("#keys tbody tr")
    for text in ("theirs", "search", "Ada", "quota:read", "usage:read"):
        expect(row).to_contain_text(text)
    expect(row.locator("[data-label=Expires] time")).to_have_attribute("datetime", "2999-01-01T00:00:00Z")

    page.get_by_role("link", name="People and services").click()
    page.get_by_role("combobox", name="Role of Ada").select_option("viewer")
    page.get_by_role("button", name="Set role of Ada").click()
    expect(page.get_by_role("row").filter(has_text="Ada").locator("[data-label=Role]")).to_have_text("viewer")
    page.get_by_role("button", name="Deactivate Ada").click()
    page.get_by_role("dialog").get_by_role("button", name="Deactivate owner").click()
    expect(page.get_by_role("button", name="Activate Ada")).to_be_visible()
    page.get_by_role("link", name="Projects").click()
    expect(page.get_by_role("button", name="Deactivate Default")).to_have_count(0)
    page.get_by_role("button", name="Deactivate Search").click()
    page.get_by_role("dialog").get_by_role("button", name="Deactivate project").click()
    page.get_by_role("button", name="Activate Search").click()
    expect(page.locator("#project-search")).to_contain_text("Active")


def test_deactivate_and_activate_a_tenant(as_operator: OpenPage, site: Site) -> None:
    slug = f"t-{uuid.uuid4().hex[:8]}"
    with site.admin() as admin:
        admin.post("/api/v1/tenants", json={"slug": slug, "name": "Green Ltd"}).raise_for_status()
    page = as_operator()
    page.goto(f"/tenants/{slug}")
    page.get_by_role("button", name="Deactivate").click()
    page.get_by_role("dialog").get_by_role("button", name="Deactivate").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Inactive")
    page.get_by_role("button", name="Activate").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Active")
    expect(page.get_by_role("button", name="Deactivate")).to_be_visible()


def test_a_viewer_finds_nothing_to_press(as_viewer: OpenPage) -> None:
    page = as_viewer()
    for path in ("/tenants", "/tenants/acme", "/tenants/acme/projects", "/tenants/acme/principals"):
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert page.locator("main form").count() == 0
        assert page.locator("main button").count() == 0


def test_an_action_that_fails_says_so(as_operator: OpenPage) -> None:
    page = as_operator()
    page.goto("/tenants/acme")
    page.locator('#new-key input[name="_csrf_token"]').evaluate("input => { input.value = 'forged'; }")
    page.get_by_label("Name").fill("never")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("alert").filter(has_text="Not done")).to_be_visible()
    expect(page.locator("#plain-key")).to_have_count(0)


def test_a_tenants_fields_are_changed_by_keyboard_and_a_slip_is_told_at_its_field(
    as_operator: OpenPage, site: Site
) -> None:
    slug = f"t-{uuid.uuid4().hex[:8]}"
    with site.admin() as admin:
        assert admin.post("/api/v1/tenants", json={"slug": slug, "name": "Blue Ltd"}).status_code == 201
    page = as_operator(viewport={"width": 375, "height": 812})
    page.goto(f"/tenants/{slug}")
    page.get_by_role("link", name="Change").click()
    page.wait_for_url(f"**/tenants/{slug}/change")
    page.get_by_label("Weight").fill("0")
    page.get_by_label("Key 1").fill("cost-centre")
    page.get_by_label("Value 1").fill("4711")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Weight must lie between 0.001 and 1000.")).to_be_visible()
    expect(page.get_by_label("Weight")).to_be_focused()
    expect(page.get_by_label("Value 1")).to_have_value("4711")
    page.get_by_label("Weight").fill("2.5")
    page.get_by_label("Name").fill("Bluer Ltd")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/tenants/{slug}")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Bluer Ltd")
    expect(page.locator("#tenant-head")).to_contain_text("4711")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    with site.admin() as admin:
        assert admin.get(f"/api/v1/tenants/{slug}").json()["weight"] == 2.5
