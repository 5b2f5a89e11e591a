"""Statements and exports: what they say agrees with the ledger and with itself."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest
from pyarrow import parquet
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.errors import InvalidRequestError, NotFoundError
from controlplane.ledger import export as exporting
from controlplane.ledger import service, statements
from controlplane.ledger.export import COLUMNS, export
from controlplane.ledger.schemas import ExportFormat, UsageDimension
from controlplane.ledger.statements import statement
from controlplane.quotas.schemas import Price
from controlplane.settings import Settings
from dataplane.protocol import UsageBasis, UsageRecord
from tests.controlplane.clients import Deployment, deployment
from tests.controlplane.ledger.test_service import some_usage
from tests.controlplane.ledger.test_sums import exact_cost, price, set_prices
from tests.controlplane.telemetry.reports import usage
from tests.factories.rows import make_tenant

NOW = datetime(2023, 12, 3, tzinfo=UTC)
NOVEMBER = datetime(2023, 11, 1, tzinfo=UTC).timestamp()
DECEMBER = datetime(2023, 12, 1, tzinfo=UTC).timestamp()
SINCE, UNTIL = datetime(2023, 11, 14, tzinfo=UTC), datetime(2023, 11, 17, tzinfo=UTC)


def a_month(rng: random.Random, number: int, tenant: str) -> list[UsageRecord]:
    """Attempts from two days before November to two days after it."""
    found = []
    for n in range(number):
        finished = rng.uniform(NOVEMBER - 2 * 86_400, DECEMBER + 2 * 86_400)
        prompt = rng.randint(0, 900)
        found.append(
            usage(
                f"a{n}",
                tenant=rng.choice([tenant, tenant, "globex"]),
                project=rng.choice(["default", "blue"]),
                key_id=rng.choice(["k1", "k2", "k3"]),
                model=rng.choice(["small", "large"]),
                pool=rng.choice(["p1", "p2"]),
                basis=rng.choice(list(UsageBasis)),
                started_at=finished - 1,
                finished_at=finished,
                prompt_tokens=prompt,
                cached_tokens=rng.randint(0, prompt),
                output_tokens=rng.randint(0, 300),
                kv_block_seconds=rng.uniform(0, 9),
                device_seconds=rng.uniform(0, 2),
            )
        )
    return found


def some_prices(rng: random.Random) -> list[Price]:
    middle = NOVEMBER + rng.uniform(5, 20) * 86_400
    first, second = ({"uncached_input": rng.randint(1, 9_999_999), "output": rng.randint(1, 9_999_999)} for _ in "12")
    return [
        price(until=middle, device_second=7, **first),
        price(since=middle, cached_input=1_234_567, **second),
        price("p2", since=NOVEMBER + 86_400 * 9.5, output=3_333_333),
    ]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata", "Pacific/Kiritimati"])
@pytest.mark.parametrize("seed", range(3))
async def test_f8_sums_by_key_model_pool_project_and_basis_are_the_tenants(
    session: AsyncSession, zone: str, seed: int
) -> None:
    rng = random.Random(seed)
    tenant = (await make_tenant(session)).slug
    await session.execute(text("UPDATE tenants SET time_zone = :zone"), {"zone": zone})
    records, prices = a_month(rng, 400, tenant), some_prices(rng)
    await set_prices(session, prices)
    await service.record(session, records)
    found = await statement(session, tenant, "2023-11", now=NOW)
    since, until = found.since.timestamp(), found.until.timestamp()
    mine = [one for one in records if one.tenant == tenant and since <= one.finished_at < until]
    assert (found.total.attempts, found.time_zone) == (len(mine), zone)
    assert found.total.output_tokens == sum(one.output_tokens for one in mine)
    assert found.total.uncached_tokens == sum(one.prompt_tokens - one.cached_tokens for one in mine)
    assert found.total.cost > 0
    for parts in (
        found.lines, found.by_project, found.by_key, found.by_model, found.by_pool, found.by_basis
    ):  # fmt: skip
        for name in ("attempts", "prompt_tokens", "cached_tokens", "uncached_tokens", "output_tokens", "cost"):
            assert sum(getattr(part, name) for part in parts) == getattr(found.total, name), name
        for name in ("kv_block_seconds", "device_seconds"):
            assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(found.total, name), abs=1e-6)
    for line in found.lines:
        same = [
            one
            for one in mine
            if (one.project, one.key_id, one.model, one.pool) == (line.project, line.key_id, line.model, line.pool)
        ]
        assert line.output_tokens == sum(one.output_tokens for one in same)
        assert line.cost == sum(exact_cost(prices, one) for one in same)
    assert {part.key for part in found.by_basis} == {basis.value for basis in UsageBasis}, "F7"
    totals = await service.usage_totals(
        session, by=UsageDimension.KEY, since=found.since, until=found.until, tenant=tenant
    )
    assert {(one.key, one.output_tokens) for one in totals} == {(one.key, one.output_tokens) for one in found.by_key}


async def test_what_has_no_price_is_said_and_costs_nothing(session: AsyncSession) -> None:
    tenant = (await make_tenant(session)).slug
    await set_prices(session, [price(output=3, since=NOVEMBER + 500)])
    await service.record(
        session,
        [
            usage("early", tenant=tenant, started_at=NOVEMBER + 10.0, finished_at=NOVEMBER + 600.0),
            usage(
                "late",
                tenant=tenant,
                started_at=NOVEMBER + 500.0,
                finished_at=NOVEMBER + 1000.0,
                output_tokens=2_000_000,
            ),
        ],
    )
    found = await statement(session, tenant, "2023-11", now=NOW)
    assert (found.total.cost, found.total.unpriced_attempts, found.total.attempts) == (6, 1, 2)
    empty = await statement(session, tenant, "2023-10", now=NOW)
    assert (empty.lines, empty.total.attempts) == ([], 0)


async def test_a_statement_that_cannot_be_given_says_why(
    session: AsyncSession, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = (await make_tenant(session)).slug
    with pytest.raises(NotFoundError):
        await statement(session, "nobody", "2023-11", now=NOW)
    with pytest.raises(InvalidRequestError, match="keeps 430 days"):
        await statement(session, tenant, "2022-08", now=NOW)
    await service.record(session, a_month(rng, 100, tenant))
    monkeypatch.setattr(statements, "MOST_LINES", 5)
    with pytest.raises(InvalidRequestError, match="at most 5 lines"):
        await statement(session, tenant, "2023-11", now=NOW)


# --------------------------------------------------------------------------------------------------------------
# Export
# --------------------------------------------------------------------------------------------------------------


async def whole(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def test_an_export_holds_every_row_of_the_span_once_and_oldest_first(
    committed_engine: AsyncEngine, rng: random.Random
) -> None:
    records = some_usage(rng, 500)
    async with transaction(committed_engine) as session:
        await service.record(session, records)
    inside = [one for one in records if one.tenant == "acme" and one.finished_at < UNTIL.timestamp()]
    expected = sorted(inside, key=lambda one: (one.finished_at, one.attempt_id))
    span = {"since": SINCE, "until": UNTIL, "tenant": "acme", "page": 64}
    rows = list(csv.DictReader(io.StringIO((await whole(export(committed_engine, ExportFormat.CSV, **span))).decode())))
    table = parquet.read_table(io.BytesIO(await whole(export(committed_engine, ExportFormat.PARQUET, **span))))
    assert tuple(table.column_names) == COLUMNS == tuple(rows[0])
    for found in (rows, table.to_pylist()):
        assert [row["attempt_id"] for row in found] == [one.attempt_id for one in expected]
        assert [int(row["output_tokens"]) for row in found] == [one.output_tokens for one in expected]
        assert [row["basis"] for row in found] == [one.basis for one in expected]
        assert [int(row["uncached_tokens"]) for row in found] == [
            one.prompt_tokens - one.cached_tokens for one in expected
        ]
    assert datetime.fromisoformat(rows[0]["finished_at"]) == table.to_pylist()[0]["finished_at"]


async def test_an_export_holds_one_page_at_a_time_and_no_connection_between(
    committed_engine: AsyncEngine, rng: random.Random
) -> None:
    async with transaction(committed_engine) as session:
        await service.record(session, some_usage(rng, 300))
    for file_format in ExportFormat:
        pieces = export(committed_engine, file_format, since=SINCE, until=UNTIL, tenant=None, page=50)
        await anext(pieces)
        async with committed_engine.connect() as connection:
            query = text("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'")
            assert await connection.scalar(query) == 0
        sizes = [len(piece) async for piece in pieces]
        assert len(sizes) >= 6
    long_ago = {"since": SINCE.replace(year=2001), "until": UNTIL.replace(year=2001)}
    empty = await whole(export(committed_engine, ExportFormat.PARQUET, tenant=None, **long_ago))
    assert parquet.read_table(io.BytesIO(empty)).num_rows == 0


async def test_no_cell_of_a_csv_is_a_formula(committed_engine: AsyncEngine) -> None:
    formulas = ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", 'plain, "quoted"']
    async with transaction(committed_engine) as session:
        await service.record(session, [usage(f"a{n}", request_id=one) for n, one in enumerate(formulas)])
    content = (await whole(export(committed_engine, ExportFormat.CSV, since=SINCE, until=UNTIL, tenant=None))).decode()
    cells = [row["request_id"] for row in csv.DictReader(io.StringIO(content, newline=""))]
    assert cells == [*(f"'{one}" for one in formulas[:-1]), formulas[-1]]


async def test_parquet_without_its_library_is_refused_by_name(
    committed_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequestError) as refused:
        export(committed_engine, ExportFormat.PARQUET, since=SINCE, until=UNTIL, tenant=None)
    assert refused.value.param == "format"


# --------------------------------------------------------------------------------------------------------------
# Routes
# --------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "accounts", "fleet", "telemetry", "ledger"]) as running:
        async with transaction(running.app.state.resources.engine) as session:
            at = {"finished_at": datetime.now(UTC).timestamp()}
            await service.record(session, [usage("a", tenant="acme", **at), usage("g", tenant="globex", **at)])
        yield running


async def get(deployed: Deployment, path: str, headers: dict[str, str] | None = None, **query: str) -> httpx.Response:
    return await deployed.client.get(
        path, params=query or None, headers=deployed.viewer if headers is None else headers
    )


async def test_statements_and_exports_are_for_operators_and_viewers(deployed: Deployment) -> None:
    month = f"{datetime.now(UTC):%Y-%m}"
    day = datetime.now(UTC).replace(hour=0, minute=0)
    span = {"since": f"{day:%Y-%m-%dT%H:%M}:00Z", "until": f"{day:%Y-%m-%dT}23:59:59Z"}
    for headers, status in (({}, 401), (deployed.tenant_member, 401), (deployed.viewer, 200), (deployed.operator, 200)):
        assert (await get(deployed, f"/api/v1/tenants/acme/statements/{month}", headers)).status_code == status
        assert (await get(deployed, "/api/v1/usage/export", headers, **span)).status_code == status
    found = (await get(deployed, f"/api/v1/tenants/acme/statements/{month}")).json()
    assert [line["output_tokens"] for line in found["lines"]] == [5], "F36: only the tenant's own"
    answer = await get(deployed, "/api/v1/usage/export", tenant="acme", **span)
    assert answer.headers["content-type"].startswith("text/csv")
    assert [row["attempt_id"] for row in csv.DictReader(io.StringIO(answer.text))] == ["a"]
    answer = await get(deployed, "/api/v1/usage/export", format="parquet", **span)
    assert parquet.read_table(io.BytesIO(answer.content)).num_rows == 2


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("tenants/acme/statements/2026-13", 400, "month"),
        ("tenants/acme/statements/soon", 400, "month"),
        ("tenants/nobody/statements/2026-11", 404, "slug"),
        ("usage/export?since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", 400, "since"),
        ("usage/export?since=2020-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", 400, "since"),
        ("usage/export?since=2026-01-01T00:00:00Z&until=2026-01-02T00:00:00Z&format=xls", 400, "format"),
    ],
)
async def test_bad_input_is_one_clear_error(deployed: Deployment, path: str, status: int, param: str) -> None:
    answer = await get(deployed, f"/api/v1/{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
