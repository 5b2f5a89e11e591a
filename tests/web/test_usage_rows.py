"""Lines of the Usage pages add up, whatever is cut off."""

from __future__ import annotations

from datetime import UTC, datetime

from jinja2 import Environment, FileSystemLoader

from controlplane.console import presenters
from controlplane.console.templates import WEB
from controlplane.console.usage import months_around, rows_of
from controlplane.ledger.schemas import UsageSum
from controlplane.tenants.schemas import PROBE_TENANT


def test_what_is_cut_off_is_summed_so_that_lines_add_up() -> None:
    sums = [(f"k{n}", UsageSum(attempts=1, prompt_tokens=n, uncached_tokens=n, cost=n)) for n in range(30)]
    rows = rows_of(sums, most=10)
    assert [row.key for row in rows[:2]] == ["k29", "k28"]
    assert (len(rows), rows[-1].rest, rows[-1].attempts) == (11, True, 20)
    assert sum(row.cost for row in rows) == sum(range(30))


def test_the_canaries_own_usage_is_marked() -> None:
    rows = rows_of([("acme", UsageSum(attempts=1)), (PROBE_TENANT, UsageSum(attempts=2))])
    marked = [row._replace(probe=row.key == PROBE_TENANT) for row in rows]
    environment = Environment(loader=FileSystemLoader(WEB / "templates"), autoescape=True)
    environment.globals["p"] = presenters
    page = '{% from "usage/_parts.html" import sums %}{{ sums("i", "l", "h", rows, "e") }}'
    shown = environment.from_string(page).render(rows=marked)
    assert shown.count("Probe") == 1
    assert shown.index(PROBE_TENANT) < shown.index("Probe")


def test_a_month_that_has_not_begun_is_not_offered() -> None:
    now = datetime(2026, 12, 31, 23, 30, tzinfo=UTC)
    assert months_around("2026-12", now, "UTC") == ("2026-11", None)
    assert months_around("2026-12", now, "Asia/Tokyo") == ("2026-11", "2027-01")
    assert months_around("2026-01", now, "UTC") == ("2025-12", "2026-02")


def test_money_is_shown_to_the_micro_unit() -> None:
    assert [presenters.money(one) for one in (0, 5, 1_000_000, 1_234_567_890_123)] == [
        "0.000000", "0.000005", "1.000000", "1,234,567.890123"
    ]  # fmt: skip
