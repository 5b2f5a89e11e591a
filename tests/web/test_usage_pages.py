"""The Usage pages: the same numbers as the statement, the admin API, the export and the command line (F8, F31)."""

from __future__ import annotations

import csv
import io
import random
import re
import time
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from pyarrow import parquet

from controlplane.console import presenters
from controlplane.db import transaction
from controlplane.ledger import service as ledger
from controlplane.telemetry.intake import store
from dataplane.protocol import UsageBasis, UsageRecord
from tests.controlplane.clients import Deployment
from tests.controlplane.ledger.test_sums import price, set_prices
from tests.controlplane.telemetry.reports import gateway_report, usage
from tests.factories.rows import make_tenant
from tests.web.test_pages import counted_queries

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOW = time.time()
MONTH = datetime.fromtimestamp(NOW, UTC).strftime("%Y-%m")
USED = ("attempts", "uncached", "cached", "output", "cost")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared: Deployment) -> Deployment:
    """With prices that changed, and what was used before and after."""
    async with transaction(shared.app.state.resources.engine) as session:
        for slug in ("globex", "empty"):
            await make_tenant(session, slug)
        await set_prices(session, [price(uncached_input=3_000_000, output=7_000_000, since=1.0, until=NOW - 100)])
        await set_prices(session, [price("large", uncached_input=1, device_second=2_500_000, since=NOW - 50)])
        await ledger.record(session, attempts())
    return shared


def attempts() -> list[UsageRecord]:
    """All within the last three minutes of this month (or the first of it), before, between and after two prices."""
    rng = random.Random(5)
    begins = datetime.fromtimestamp(NOW, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    return [
        usage(
            f"a{n}",
            tenant=rng.choice(["acme", "acme", "globex"]),
            project=rng.choice(["default", "blue"]),
            key_id=rng.choice(["k1", "k2", "k3"]),
            model=rng.choice(["small", "big"]),
            pool=rng.choice(["little", "large"]),
            basis=rng.choice(list(UsageBasis)),
            started_at=(arrived := max(begins, NOW - rng.uniform(0, 180))),
            finished_at=arrived,
            prompt_tokens=(prompt := rng.randint(0, 900)),
            cached_tokens=rng.randint(0, prompt),
            output_tokens=rng.randint(0, 300),
            device_seconds=rng.uniform(0, 2),
        )
        for n in range(300)
    ]


def table(page: str, name: str) -> dict[str, tuple[int, ...]]:
    """Numbers of a table's lines by their first cell: attempts, uncached, cached, output, cost in micro-units."""
    body = page.split(f'id="{name}-body"', 1)[1].split("</tbody>", 1)[0]
    found: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(re.findall(r"<tr.*?</tr>", body, re.S)):
        head = re.sub(r"<[^>]+>", "", re.search(r"<th.*?</th>", line, re.S).group()).strip()  # type: ignore[union-attr]
        values = re.findall(r'data-label="[^"]+"><span class="figure">([\d,.]+)</span>', line)
        whole = [int(one.replace(",", "")) for one in values[:4]]
        found[f"{head}#{number}" if head in found else head] = (
            *whole,
            int(values[-1].replace(",", "").replace(".", "")),
        )
    return found


def summed(lines: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*lines.values(), strict=True))


def of(one: dict[str, object]) -> tuple[int, ...]:
    names = ("attempts", "uncached_tokens", "cached_tokens", "output_tokens", "cost")
    return tuple(int(str(one[name])) for name in names)


async def test_f8_every_page_api_route_and_export_says_the_same(operator: Deployment) -> None:
    page = (await operator.client.get(f"/tenants/acme/usage?month={MONTH}")).text
    client, token = operator.client, operator.operator
    statement = (await client.get(f"/api/v1/tenants/acme/statements/{MONTH}", headers=token)).json()
    truth = of(statement["total"])
    assert truth[0] > 100 and truth[4] > 0 and statement["total"]["unpriced_attempts"] > 0
    for name in ("project", "key", "model", "pool", "basis", "lines"):
        assert summed(table(page, f"usage-{name}")) == truth, name
    assert presenters.money(truth[4]) in page
    everyone = (await operator.client.get(f"/usage?month={MONTH}")).text
    assert table(everyone, "usage-tenants")["acme"] == truth
    span = {"since": statement["since"], "until": statement["until"]}
    for by in ("tenant", "project", "key", "model", "pool", "day", "basis"):
        totals = (
            await client.get("/api/v1/usage/totals", params={**span, "by": by, "tenant": "acme"}, headers=token)
        ).json()
        assert summed({str(n): of(one) for n, one in enumerate(totals)}) == truth, by
    for form in ("csv", "parquet"):
        answer = await operator.client.get(f"/tenants/acme/usage/export?month={MONTH}&format={form}")
        assert f'filename="usage-acme-{MONTH}.{form}"' in answer.headers["content-disposition"]
        rows = (
            list(csv.DictReader(io.StringIO(answer.text)))
            if form == "csv"
            else parquet.read_table(io.BytesIO(answer.content)).to_pylist()
        )
        assert {row["tenant"] for row in rows} == {"acme"}
        columns = ("uncached_tokens", "cached_tokens", "output_tokens", "cost")
        assert (len(rows), *(sum(int(row[name] or 0) for row in rows) for name in columns)) == truth, form


async def test_f31_the_pages_take_a_bounded_number_of_queries(operator: Deployment) -> None:
    with counted_queries(operator.app.state.resources.engine) as statements:
        for path, sums in (
            (f"/tenants/acme/usage?month={MONTH}", 1),
            (f"/usage?month={MONTH}", 1),
            ("/usage/arriving", 0),
        ):
            statements.clear()
            assert (await operator.client.get(path)).status_code == 200
            assert sum("usage_daily" in one for one in statements) == sums, statements
            tables = ("usage_daily", "usage_held", "gateways", "replicas", "tenants")
            assert sum(any(f"FROM {name}" in one for name in tables) for one in statements) <= 4, statements


async def test_a_month_without_usage_and_one_that_is_none_say_so(operator: Deployment) -> None:
    answer = await operator.client.get("/tenants/empty/usage")
    assert answer.status_code == 200
    assert answer.text.count("<h1") == 1
    assert "empty-state" in answer.text and 'aria-current="page"' in answer.text
    assert (await operator.client.get("/usage?month=2026-13")).status_code in {400, 422}
    assert (await operator.client.get("/tenants/nobody/usage")).status_code == 404


async def test_a_full_spool_is_named_on_the_page(operator: Deployment) -> None:
    now = time.time()
    full = gateway_report(
        [], gateway="gw-full", spool_bytes=1_234_567, spool_full=True, spool_oldest_at=now - 90, sent_at=now
    )
    async with transaction(operator.app.state.resources.engine) as session:
        await store(session, [full, gateway_report([], gateway="gw-empty", sent_at=now)], now)
    page = (await operator.client.get("/usage/arriving")).text
    assert "1,234,567" in page and "Full: refuses requests" in page
    assert "gw-empty" in page and "Empty" in page
