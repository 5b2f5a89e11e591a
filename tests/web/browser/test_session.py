"""Logging in and out in a browser."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.web.browser.conftest import OPERATOR, OpenPage, log_in

pytestmark = pytest.mark.browser


def test_a_stranger_logs_in_and_lands_where_they_wanted_to_go(open_page: OpenPage) -> None:
    page = open_page()
    page.goto("/tenants")
    expect(page).to_have_url(re.compile("/login"))
    page.get_by_label("Email").fill(OPERATOR)
    page.get_by_label("Password").fill("correct horse battery staple")
    page.get_by_label("Password").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Tenants and keys")
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(re.compile("/login$"))
    page.goto("/")
    expect(page).to_have_url(re.compile("/login$"))


def test_a_wrong_password_is_said_and_the_email_stays(open_page: OpenPage) -> None:
    page = open_page()
    log_in(page, "nobody@example.com", "certainly wrong")
    expect(page.get_by_role("alert")).to_contain_text("The email or the password is wrong.")
    expect(page.get_by_label("Email")).to_have_value("nobody@example.com")
    expect(page.get_by_label("Password")).to_have_value("")
    expect(page.get_by_label("Password")).to_be_focused()


def test_a_session_ended_elsewhere_ends_the_live_page(open_page: OpenPage) -> None:
    page = open_page()
    log_in(page, OPERATOR)
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    other = page.context.new_page()
    other.goto("/replicas")
    other.get_by_role("button", name="Log out").click()
    expect(other).to_have_url(re.compile("/login$"))
    expect(page).to_have_url(re.compile("/login"), timeout=30_000)
