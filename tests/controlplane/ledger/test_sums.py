"""Sums over any span, exact, whoever asks by what; and what they cost."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sqlalchemy import event, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import InvalidRequestError
from controlplane.ledger import service
from controlplane.ledger.costing import PriceList
from controlplane.ledger.schemas import UsageDimension, UsageLine
from controlplane.ledger.spans import Segment, month_of, split, start_of
from controlplane.ledger.sums import Whose, query
from controlplane.quotas import price_repository, price_service
from controlplane.quotas.schemas import Price
from controlplane.quotas.views import PriceSpec
from controlplane.tenants import service as tenants
from dataplane.protocol import UsageRecord
from tests.controlplane.ledger.test_service import some_usage
from tests.controlplane.telemetry.reports import usage
from tests.factories.rows import make_key, make_tenant

COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")
FIRST = datetime(2023, 11, 14, tzinfo=UTC)
moments = st.datetimes(datetime(2023, 11, 13), datetime(2023, 11, 18), timezones=st.just(UTC))


@given(moments, st.one_of(st.none(), moments), st.integers(0, 5 * 86_400))
def test_every_instant_lies_in_exactly_one_part(since: datetime, until: datetime | None, offset: int) -> None:
    parts = split(Segment(since, until))
    at = datetime(2023, 11, 13, tzinfo=UTC) + timedelta(seconds=offset)
    holding = [edge for edge in parts.edges if edge[0] <= at < edge[1]]
    inside = (parts.first <= at.date() < parts.end) + len(holding)
    assert inside == (since <= at and (until is None or at < until))
    assert all(before < after and after - before < timedelta(days=1) for before, after in parts.edges)


def price(pool: str = "", since: float = 0.0, until: float | None = None, **amounts: int) -> Price:
    values = {"uncached_input": 0, "cached_input": 0, "output": 0, "device_second": 0, **amounts}
    return Price(pool=pool, valid_from=since, valid_until=until, **values)


async def test_f8_any_span_summed_by_anything_is_the_sum_of_its_rows(session: AsyncSession, rng: random.Random) -> None:
    records = some_usage(rng, 400)
    records += [
        usage(f"more-{n}", started_at=FIRST.timestamp() - 1, finished_at=FIRST.timestamp() + rng.uniform(0, 4 * 86_400))
        for n in range(200)
    ]
    await service.record(session, records)
    for _ in range(40):
        ends = sorted(FIRST + timedelta(seconds=rng.choice([0, 3600, 86_400, rng.uniform(0, 5e5)])) for _ in range(2))
        since, until = ends if ends[0] < ends[1] else (FIRST, FIRST + timedelta(days=2))
        inside = [one for one in records if since.timestamp() <= one.finished_at < until.timestamp()]
        truth = (len(inside), *(sum(getattr(one, name) for one in inside) for name in COUNTS))
        for by in UsageDimension:
            totals = await service.usage_totals(session, by=by, since=since, until=until)
            summed = tuple(sum(getattr(total, name) for total in totals) for name in ("attempts", *COUNTS))
            assert summed == truth, by
            assert sum(total.uncached_tokens for total in totals) == truth[1] - truth[2]
            assert len({(total.tenant, total.key) for total in totals}) == len(totals)


async def test_sum_since_takes_the_tenant_its_projects_and_a_key_over_its_rotations(session: AsyncSession) -> None:
    acme = await make_tenant(session)
    key = (await make_key(session, acme.slug)).view
    other = (await make_key(session, acme.slug)).view
    await session.execute(
        text("UPDATE api_keys SET identity = :first WHERE key_id = :second"),
        {"first": key.key_id, "second": other.key_id},
    )
    stranger = (await make_key(session, acme.slug)).view
    at = {"tenant": acme.slug, "project": "default", "finished_at": FIRST.timestamp() + 7200}
    await service.record(
        session,
        [
            usage("a", key_id=key.key_id, output_tokens=1, **at),
            usage("b", key_id=other.key_id, output_tokens=10, **{**at, "model": "large"}),
            usage("c", key_id=stranger.key_id, output_tokens=100, **{**at, "project": "blue"}),
            usage("d", key_id=key.key_id, output_tokens=1000, **{**at, "tenant": "globex"}),
            usage("e", key_id=key.key_id, output_tokens=10_000, started_at=1.0, **{**at, "finished_at": 2.0}),
        ],
    )
    assert await tenants.key_ids_of(session, key.key_id) == sorted([key.key_id, other.key_id])
    for asked, expected in (
        ({}, 111),
        ({"project": "default"}, 11),
        ({"project": "blue"}, 100),
        ({"key_identity": key.key_id}, 11),
        ({"key_identity": stranger.key_id}, 100),
        ({"key_identity": "nobody"}, 0),
        ({"model": "large"}, 10),
        ({"key_identity": key.key_id, "model": "large", "project": "default"}, 10),
        ({"until": FIRST + timedelta(hours=2)}, 0),
        ({"until": FIRST + timedelta(hours=2, seconds=1)}, 111),
    ):
        for since in (FIRST, FIRST + timedelta(hours=1), FIRST + timedelta(hours=2)):
            found = await service.sum_since(session, tenant=acme.slug, since=since, **asked)
            assert found.output_tokens == expected, (asked, since)
    with pytest.raises(InvalidRequestError):
        await service.sum_since(session, tenant="acme", since=FIRST.replace(tzinfo=None))


async def set_prices(session: AsyncSession, prices: Sequence[Price]) -> None:
    """A history of prices, as if they had been set in time."""
    for one in prices:
        values = {name: getattr(one, name) for name in price_service.AMOUNTS}
        spans = {
            name: None if at is None else datetime.fromtimestamp(at, UTC)
            for name, at in (("valid_from", one.valid_from), ("valid_until", one.valid_until))
        }
        await price_repository.add_price(session, pool=one.pool, set_by="op", idempotency_key=None, **values, **spans)


def exact_cost(prices: Sequence[Price], one: UsageRecord) -> int:
    """Micro-units, worked out another way than the ledger does: with fractions."""
    in_force = [
        price
        for price in prices
        if price.pool in (one.pool, "") and price.valid_from <= one.started_at < (price.valid_until or math.inf)
    ]
    used = max(in_force, key=lambda price: price.pool)
    tokens = (
        (one.prompt_tokens - one.cached_tokens) * used.uncached_input
        + one.cached_tokens * used.cached_input
        + one.output_tokens * used.output
    )
    device = Fraction(round(one.device_seconds * 10**9), 10**9) * used.device_second
    return round(Fraction(tokens, 10**6) + device)


async def all_lines(session: AsyncSession) -> AsyncIterator[UsageLine]:
    after = None
    while True:
        page = await service.usage_page(session, after=after, limit=200)
        for line in page.items:
            yield line
        if (after := page.next) is None:
            return


async def test_money_is_each_attempt_at_the_price_when_its_request_arrived(
    session: AsyncSession, rng: random.Random
) -> None:
    noon = FIRST.timestamp() + 43_200
    prices = [
        price(uncached_input=2_000_000, output=5_000_000, until=noon),
        price(uncached_input=4_000_000, cached_input=1_000_000, output=7_000_000, device_second=3, since=noon),
        price("dear", output=90_000_000, since=noon + 100.5, until=noon + 5000),
    ]
    records = [
        usage(
            f"a{n}",
            pool=rng.choice(["cheap", "dear"]),
            started_at=(arrived := FIRST.timestamp() + rng.uniform(0, 200_000)),
            finished_at=arrived + rng.uniform(0, 20_000),
            device_seconds=rng.uniform(0, 5),
            output_tokens=n,
        )
        for n in range(150)
    ]
    await set_prices(session, prices)
    await service.record(session, records)
    truth = sum(exact_cost(prices, one) for one in records)
    found = await service.sum_since(session, tenant="demo", since=FIRST)
    assert (found.cost, found.unpriced_attempts) == (truth, 0)
    for by in UsageDimension:
        totals = await service.usage_totals(session, by=by, since=FIRST, until=FIRST + timedelta(days=5))
        assert sum(one.cost for one in totals) == truth, by
    lines = [line async for line in all_lines(session)]
    assert sum(line.cost or 0 for line in lines) == truth, "rows, sums by day and parts of days agree"


async def test_a_new_price_changes_no_row_and_no_sum(session: AsyncSession) -> None:
    now = datetime.now(UTC)
    at = {"started_at": now.timestamp() - 1, "prompt_tokens": 0, "cached_tokens": 0}
    running, new = now.timestamp() + 60, datetime.now(UTC).timestamp() + 1
    dear = PriceSpec(uncached_input=1, cached_input=1, output=9_000_000, valid_from=None)
    await service.record(session, [usage("free", output_tokens=1_000_000, finished_at=running, **at)])
    await price_service.set_price(session, dear, by="op")
    await service.record(session, [usage("before", output_tokens=1_000_000, finished_at=running, **at)])
    after = {**at, "started_at": new}
    await service.record(session, [usage("after", output_tokens=1_000_000, finished_at=running, **after)])
    lines = {line.attempt_id: line.cost async for line in all_lines(session)}
    assert lines == {"free": None, "before": None, "after": 9_000_000}
    found = await service.sum_since(session, tenant="demo", since=now - timedelta(days=1))
    assert (found.cost, found.unpriced_attempts, found.attempts) == (9_000_000, 2, 3)
    await price_service.set_price(session, structs.replace(dear, output=1), by="op")
    assert await service.sum_since(session, tenant="demo", since=now - timedelta(days=1)) == found
    day = now.date()
    assert await service.check_sums(session, day, day + timedelta(days=1)) == []


def test_a_pools_own_price_goes_first_and_half_is_rounded_to_even() -> None:
    prices = [price(since=10.25, output=1_000_000), price("p", since=20.0, until=30.1, output=7_000_000)]
    known = PriceList(prices)

    def cost(at: float, pool: str = "p") -> int | None:
        return known.cost(usage(pool=pool, started_at=at, prompt_tokens=0, cached_tokens=0, output_tokens=1))

    assert [cost(at) for at in (10.0, 10.25, 20.0, 30.0, 30.1)] == [None, 1, 7, 7, 1]
    assert cost(25.0, "other") == 1
    half = PriceList([price(uncached_input=1)])
    costs = [half.cost(usage(prompt_tokens=n * 500_000, cached_tokens=0, output_tokens=0)) for n in (1, 3, 4)]
    assert costs == [0, 2, 2]


@pytest.mark.parametrize(
    ("zone", "month", "begins", "ends"),
    [
        ("UTC", "2026-11", "2026-11-01T00:00:00+00:00", "2026-12-01T00:00:00+00:00"),
        ("Europe/Berlin", "2026-03", "2026-02-28T23:00:00+00:00", "2026-03-31T22:00:00+00:00"),
        ("America/New_York", "2026-11", "2026-11-01T04:00:00+00:00", "2026-12-01T05:00:00+00:00"),
        ("Asia/Kolkata", "2024-02", "2024-01-31T18:30:00+00:00", "2024-02-29T18:30:00+00:00"),
        ("Australia/Lord_Howe", "2026-12", "2026-11-30T13:00:00+00:00", "2026-12-31T13:00:00+00:00"),
        ("America/Havana", "2026-11", "2026-11-01T04:00:00+00:00", "2026-12-01T05:00:00+00:00"),
        ("America/Asuncion", "2017-10", "2017-10-01T04:00:00+00:00", "2017-11-01T03:00:00+00:00"),
    ],
)
def test_f9_a_month_is_a_calendar_month_of_the_zone(zone: str, month: str, begins: str, ends: str) -> None:
    """Havana repeats its first hour of that November, Asunción has no midnight on that first of October."""
    found = month_of(month, ZoneInfo(zone))
    assert found.until is not None
    assert (found.since.isoformat(), found.until.isoformat()) == (begins, ends)


@pytest.mark.parametrize("wrong", ["", "2026-13", "2026-00", "2026-1", "26-11", "2026-11-01", "9999-12", "0000-01"])
def test_what_is_no_month_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        month_of(wrong, ZoneInfo("UTC"))
    assert refused.value.param == "month"


async def test_f31_a_sum_reads_sums_and_the_rows_of_two_days_in_one_query(session: AsyncSession) -> None:
    today = start_of(datetime.now(UTC).date())
    records = [
        usage(
            f"{day}-{n}",
            tenant=f"t{n % 50}",
            started_at=1.0,
            finished_at=(today + timedelta(days=day - 1, seconds=n)).timestamp(),
        )
        for day in range(10)
        for n in range(300)
    ]
    await service.record(session, records)
    await session.execute(text("ANALYZE usage_ledger, usage_daily"))
    statements: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen((await session.connection()).sync_connection, "before_cursor_execute", record)
    span = Segment(today + timedelta(hours=5, days=-1), today + timedelta(hours=1, days=6))
    found = await service.sum_since(session, tenant="t7", since=span.since, until=span.until)
    assert (len(statements), found.attempts) == (1, 7 * 6)
    statement = query(span, by=[], whose=Whose(tenant="t7"))
    assert statement is not None
    compiled = statement.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True})
    plan = await _plan(session, str(compiled))
    read = {part for part in plan.split() if part.startswith("usage_ledger_p")}
    days = {f"usage_ledger_p{(today + timedelta(days=n)):%Y%m%d}" for n in (-1, 6)}
    assert {name.split("_tenant")[0] for name in read} == days, plan
    assert "Seq Scan on usage_ledger" not in plan and "usage_daily" in plan, plan


async def test_f31_a_page_reads_only_partitions_it_may_need_and_by_index(session: AsyncSession) -> None:
    today = start_of(datetime.now(UTC).date())
    await service.record(
        session,
        [usage(f"a{n}", started_at=1.0, finished_at=(today + timedelta(seconds=n)).timestamp()) for n in range(3000)],
    )
    await session.execute(text("ANALYZE usage_ledger"))
    upper = (today + timedelta(seconds=1000)).isoformat()
    plan = await _plan(
        session,
        "SELECT * FROM usage_ledger WHERE tenant = 'demo' "
        f"AND finished_at <= '{upper}' AND finished_at >= '{today.isoformat()}' "
        f"AND (finished_at, attempt_id) < ('{upper}', 'a9') ORDER BY finished_at DESC, attempt_id DESC LIMIT 51",
    )
    assert f"usage_ledger_p{today:%Y%m%d}" in plan and "Index Scan Backward" in plan, plan
    assert plan.count("Scan") == 1 and "Sort" not in plan, plan


async def _plan(session: AsyncSession, statement: str) -> str:
    return "\n".join(await session.scalars(text(f"EXPLAIN {statement}".replace(":", "\\:"))))
