"""A million rows: pages by keyset, few queries, no plan that reads more than a page needs (F31)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.ledger import service
from controlplane.ledger.spans import start_of
from controlplane.settings import Settings
from tests.controlplane.clients import Deployment, deployment, log_in

pytestmark = pytest.mark.slow

ROWS = 1_000_000
DAYS = 10
TENANTS = 50

_FILL = """
INSERT INTO usage_ledger (attempt_id, request_id, tenant, project, key_id, pool, model, replica, boot_epoch, started_at,
  finished_at, finish, basis, prompt_tokens, cached_tokens, output_tokens, kv_block_seconds, device_seconds, cost)
SELECT 'a' || n, 'r', 't' || n % :tenants, 'default', 'k' || n % 200, 'p', 'm' || n % 5, 'r', 1,
  CAST(:since AS timestamptz), CAST(:since AS timestamptz) + n * CAST(:step AS double precision) * interval '1 second',
  'stop', 'engine', n % 700, n % 7, n % 300, 0.25, 0.5, n % 1000
FROM generate_series(0, :rows - 1) AS n
"""
_SUM = """
INSERT INTO usage_daily
SELECT (finished_at AT TIME ZONE 'UTC')::date, tenant, project, key_id, model, pool, basis, count(*),
  sum(prompt_tokens), sum(cached_tokens), sum(output_tokens), sum(round(kv_block_seconds::numeric, 6)),
  sum(round(device_seconds::numeric, 6)), sum(cost), 0
FROM usage_ledger GROUP BY 1, 2, 3, 4, 5, 6, 7
"""


async def filled(engine: AsyncEngine, since: datetime) -> None:
    step = DAYS * 86_400 / ROWS
    async with transaction(engine) as session:
        await session.execute(text("SET LOCAL synchronous_commit = off"))
        values = {"tenants": TENANTS, "rows": ROWS, "since": since, "step": step}
        await session.execute(text(_FILL), values)
        await session.execute(text(_SUM))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("ANALYZE usage_ledger, usage_daily"))


class Seen:
    """Statements on the ledger's tables, with their parameters."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.statements: list[tuple[str, Any]] = []
        event.listen(engine.sync_engine, "before_cursor_execute", self._note)

    def _note(self, _connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if re.search(r"FROM usage_(ledger|daily)\b", statement) and not statement.startswith("EXPLAIN"):
            self.statements.append((statement, parameters))


async def read_rows(engine: AsyncEngine, statement: str, parameters: Any) -> tuple[int, str]:
    """Rows that the plan's scans really read, and the plan."""
    async with engine.connect() as connection:
        plan = (
            await connection.exec_driver_sql(f"EXPLAIN (ANALYZE, TIMING off, COSTS off) {statement}", parameters)
        ).all()
    lines = [row[0] for row in plan]
    scans = [line for line in lines if "Scan" in line and "never executed" not in line]
    return sum(int(float(found[1])) for line in scans if (found := re.search(r"rows=([\d.]+)", line))), "\n".join(lines)


async def test_f31_pages_and_sums_of_a_million_rows_read_what_they_show(
    settings: Settings, committed_engine: AsyncEngine
) -> None:
    today = start_of(datetime.now(UTC).date())
    since = today - timedelta(days=DAYS - 2)
    async with deployment(settings) as deployed:
        engine = deployed.app.state.resources.engine
        async with transaction(engine) as session:
            await service.keep_partitions(session, (today - timedelta(days=DAYS)).timestamp(), most=60)
        await filled(committed_engine, since)
        seen = Seen(engine)
        for tenant, pages in ((None, 4), ("t7", 4)):
            await _pages(deployed, seen, tenant, pages)
        await _sums(deployed, seen, since)


async def _pages(deployed: Deployment, seen: Seen, tenant: str | None, pages: int) -> None:
    engine = deployed.app.state.resources.engine
    after = None
    query = {"limit": "200", **({"tenant": tenant} if tenant else {})}
    for number in range(pages):
        seen.statements.clear()
        more = {"after": after} if after else {}
        answer = await deployed.client.get("/api/v1/usage", params={**query, **more}, headers=deployed.operator)
        page = answer.json()
        assert len(page["items"]) == 200
        assert len(seen.statements) == 1, "one query a page"
        rows, plan = await read_rows(engine, *seen.statements[0])
        assert rows <= 300, f"page {number} of {tenant}: {plan}"
        assert "Seq Scan on usage_ledger_p" not in plan, plan
        after = page["next"]


async def _sums(deployed: Deployment, seen: Seen, since: datetime) -> None:
    """Totals and pages of a month read sums by day, and rows of the partial days at the ends alone."""
    engine = deployed.app.state.resources.engine
    span = {
        "since": (since + timedelta(hours=1)).isoformat(),
        "until": (since + timedelta(days=DAYS - 1, hours=1)).isoformat(),
    }
    for by in ("key", "model", "day"):
        seen.statements.clear()
        answer = await deployed.client.get(
            "/api/v1/usage/totals", params={**span, "by": by, "tenant": "t7"}, headers=deployed.operator
        )
        assert answer.status_code == 200
        (statement,) = seen.statements
        rows, plan = await read_rows(engine, *statement)
        assert rows < ROWS / TENANTS / 2, plan
        assert "Seq Scan on usage_ledger_p" not in plan, plan
    await deployed.app.state.resources.redis.flushdb()
    await log_in(deployed, deployed.operator_email)
    for path in ("/usage", f"/usage?month={since:%Y-%m}"):
        seen.statements.clear()
        assert (await deployed.client.get(path)).status_code == 200
        assert len(seen.statements) == 1
        _, plan = await read_rows(engine, *seen.statements[0])
        assert "usage_ledger_p" not in plan, "whole days in UTC are sums already"
