"""The Overview changes by itself while requests run, says what it cannot know, and outlives an outage."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from dataplane.protocol import ReplicaState
from tests.web.browser.conftest import OpenPage, Reporters, Site

pytestmark = pytest.mark.browser


STATE, RUNNING, KV, HIT, TTFT, ENGINE_TTFT, TPOT, ENGINE_TPOT, OUTPUT = range(9)


def row(page: Page, replica: str) -> Locator:
    return page.locator("tr", has=page.locator(f"#overview-replica-{replica}"))


def milliseconds(cell: Locator) -> float:
    number, unit = cell.locator(".figure").inner_text().split()
    assert unit == "ms"
    return float(number)


def live(page: Page) -> None:
    """The stream is open and its first events have been drawn."""
    expect(page.locator("#freshness [data-state=live]")).to_be_visible(timeout=30_000)
    expect(page.locator("figure.trend canvas").first).to_be_visible()


def test_the_overview_changes_live_while_reports_come_in(as_operator: OpenPage, reporters: Reporters) -> None:
    reporter = reporters("live-1")
    reporter.report(running=0, used=0)
    page = as_operator()
    page.goto("/?window=60")
    cells = row(page, "live-1").locator("td")
    expect(cells.nth(TTFT)).to_contain_text("no data")
    reporter.serve(ttft=0.200, engine_ttft=0.150, tpot=0.030, requests=7)
    reporter.report(running=3, waiting=2, used=256)
    expect(cells.nth(TTFT)).to_contain_text("n 7")
    expect(cells.nth(STATE)).to_contain_text("Ready")
    expect(row(page, "live-1").get_by_role("rowheader")).to_contain_text("captured on avx2 · weights in blocks")
    expect(cells.nth(RUNNING)).to_have_text(re.compile(r"3\s*2"))
    expect(cells.nth(KV)).to_contain_text("50 %")
    expect(cells.nth(HIT)).to_have_text(re.compile(r"40\s%\s*30 %"))
    assert 182 <= milliseconds(cells.nth(TTFT)) <= 219  # 200 ms within a bucket's width
    assert 136 <= milliseconds(cells.nth(ENGINE_TTFT)) <= 165
    assert 27 <= milliseconds(cells.nth(TPOT)) <= 33
    expect(page.locator("#overview-tenant-acme")).to_be_visible()
    reporter.serve(ttft=0.200, engine_ttft=0.150, tpot=0.030, requests=5)
    reporter.report()
    expect(cells.nth(TTFT)).to_contain_text("n 12")
    with reporter.reporting():
        live(page)
    expect(page.get_by_role("img", name=re.compile("TTFT at the gateway: p50 now .* ms"))).to_be_visible()


def test_f27_what_lies_above_the_histogram_shows_as_more_than(as_operator: OpenPage, reporters: Reporters) -> None:
    reporter = reporters("slow-1")
    reporter.serve(ttft=5000.0, engine_ttft=5000.0, tpot=0.03, requests=2000)
    reporter.report()
    page = as_operator()
    page.goto("/?window=60")
    expect(row(page, "slow-1").locator("td").nth(TTFT)).to_contain_text(">4,096 s")


def test_the_window_is_chosen_without_leaving_the_page(as_operator: OpenPage) -> None:
    page = as_operator()
    page.goto("/")
    picker = page.get_by_role("navigation", name="Window")
    expect(picker.locator("[aria-current]")).to_have_text("5 min")
    picker.get_by_role("link", name="1 h").click()
    expect(picker.locator("[aria-current]")).to_have_text("1 h")
    expect(page).to_have_url(re.compile(r"window=3600"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.go_back()
    expect(page.get_by_role("navigation", name="Window").locator("[aria-current]")).to_have_text("5 min")


def test_chart_points_can_be_read_as_a_table(as_operator: OpenPage, reporters: Reporters) -> None:
    reporter = reporters("table-1")
    reporter.serve(ttft=0.2, engine_ttft=0.1, tpot=0.03)
    reporter.report()
    page = as_operator()
    page.goto("/?window=60")
    figure = page.locator("figure.trend").first
    expect(figure.locator("canvas")).to_be_visible()
    figure.get_by_text("Points as a table").click()
    rows = figure.locator("tbody tr")
    expect(rows).to_have_count(6)
    expect(figure.locator("thead th")).to_have_text(["Time", "p50", "p95", "p99"])
    shown = figure.locator("tbody td").all_inner_texts()
    assert any("ms" in text for text in shown)
    assert "0" not in shown


def test_the_focus_stays_while_figures_are_replaced(as_operator: OpenPage, reporters: Reporters) -> None:
    reporter = reporters("focus-1")
    reporter.serve(ttft=0.2, engine_ttft=0.1, tpot=0.03)
    reporter.report()
    page = as_operator()
    with reporter.reporting():
        page.goto("/?window=60")
        live(page)
        link = page.locator("#overview-replica-focus-1")
        link.focus()
        expect(row(page, "focus-1")).to_contain_text("n 1")
        reporter.serve(ttft=0.9, engine_ttft=0.8, tpot=0.05, requests=50)
        expect(row(page, "focus-1")).to_contain_text("n 51")
        expect(link).to_be_focused()


def test_a_replica_that_restarts_and_fails_shows_it(as_operator: OpenPage, reporters: Reporters) -> None:
    reporter = reporters("card-1")
    reporter.report(running=4, used=128)
    page = as_operator()
    page.goto("/replicas")
    card = page.locator("#replica-card-1")
    expect(card).to_contain_text("Ready")
    expect(card).to_contain_text("128 of 512 blocks")
    expect(card).to_contain_text("cpu · captured on avx2 · weights in blocks")
    opened = card.locator("details[open]")
    before = opened.count()
    card.get_by_text("Setup and identity").click()
    expect(opened).to_have_count(1 - before)
    reporter.report(state=ReplicaState.FAILED, core_restarts=1)
    expect(card).to_contain_text("Failed")
    expect(card.locator("dt:text-is('Core restarts') + dd")).to_have_text("1")
    expect(opened).to_have_count(1 - before)  # a refresh leaves it as the reader put it


def test_postgres_away_greys_the_figures_and_recovers(as_operator: OpenPage, reporters: Reporters, site: Site) -> None:
    reporter = reporters("outage-1")
    reporter.serve(ttft=0.2, engine_ttft=0.1, tpot=0.03, requests=3)
    page = as_operator()
    with reporter.reporting():
        page.goto("/")
        live(page)
        figure = page.locator('[data-stat="tpot"] .figure')
        plain = figure.evaluate("node => getComputedStyle(node).color")
        site.postgres.cut()
        try:
            expect(page.locator("#freshness")).to_contain_text("PostgreSQL does not answer", timeout=40_000)
            expect(page.locator("#freshness")).to_contain_text("since")
            expect(figure).to_contain_text("ms")
            expect(figure).not_to_have_css("color", plain)
        finally:
            site.postgres.mend()
        expect(page.locator("#freshness [data-state=live]")).to_be_visible(timeout=40_000)
        expect(figure).to_have_css("color", plain)


def test_redis_away_is_said_and_the_figures_go_on(as_operator: OpenPage, reporters: Reporters, site: Site) -> None:
    reporter = reporters("redis-1")
    page = as_operator()
    with reporter.reporting():
        page.goto("/?window=60")
        live(page)
        site.redis.cut()
        try:
            expect(page.locator("#freshness")).to_contain_text("Redis does not answer", timeout=40_000)
            reporter.serve(ttft=0.2, engine_ttft=0.1, tpot=0.03, requests=3)
            expect(row(page, "redis-1").locator("td").nth(TTFT)).to_contain_text("n 3", timeout=40_000)
        finally:
            site.redis.mend()
        expect(page.locator("#freshness [data-state=live]")).to_be_visible(timeout=60_000)
