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
    for path in ("/tenants", "/tenants/acme"):
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
