"""Prices with their history on a real database: no overlap, nothing that was charged ever changes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError, TidegateError
from controlplane.quotas import price_service, service
from controlplane.quotas.money import Use, price_at, settled
from controlplane.quotas.views import LARGEST_RATE, PriceSpec
from tests.factories.rows import make_tenant


def price(output: int, pool: str | None = None, **values: object) -> PriceSpec:
    return PriceSpec(uncached_input=1, cached_input=1, output=output, pool=pool, **values)  # type: ignore[arg-type]


def later(**span: float) -> datetime:
    return datetime.now(UTC) + timedelta(**span)


async def history(session: AsyncSession, pool: str) -> list[tuple[int, datetime, datetime | None]]:
    rows = (await price_service.list_prices(session, pool=pool)).items
    return [(row.output, row.valid_from, row.valid_until) for row in reversed(rows)]


async def test_a_new_price_ends_the_one_before_without_gap_or_overlap(session: AsyncSession) -> None:
    for output in (1, 2, 3):
        await price_service.set_price(session, price(output, "gpu"), by="op")
    first, second, third = await history(session, "gpu")
    assert (first[0], second[0], third[0]) == (1, 2, 3)
    assert (first[2], second[2], third[2]) == (second[1], third[1], None)
    prices = await price_service.prices_in_force(session)
    found = price_at(prices, "gpu", third[1].timestamp())
    assert found is not None
    assert found.output == 3


async def test_a_price_between_two_ends_where_the_planned_one_starts(session: AsyncSession) -> None:
    await price_service.set_price(session, price(1, "gpu"), by="op")
    far, near = later(days=9), later(days=3)
    await price_service.set_price(session, price(9, "gpu", valid_from=far), by="op")
    planned = await price_service.set_price(session, price(3, "gpu", valid_from=near), by="op")
    rows = await history(session, "gpu")
    assert [(row[0], row[2]) for row in rows] == [(1, near), (3, far), (9, None)]
    await price_service.take_back(session, planned.id)
    rows = await history(session, "gpu")
    assert [(row[0], row[2]) for row in rows] == [(1, far), (9, None)]


async def test_what_was_charged_never_changes(session: AsyncSession) -> None:
    made = await price_service.set_price(session, price(5, "gpu"), by="op")
    with pytest.raises(InvalidRequestError) as refused:
        await price_service.set_price(session, price(6, "gpu", valid_from=later(hours=-1)), by="op")
    assert refused.value.param == "valid_from"
    with pytest.raises(ConflictError, match="in force"):
        await price_service.take_back(session, made.id)
    with pytest.raises(NotFoundError):
        await price_service.take_back(session, uuid4())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE prices SET output = 1",
        "UPDATE prices SET valid_from = now() + interval '1 day'",
        "UPDATE prices SET valid_until = now() - interval '1 minute'",
        "UPDATE prices SET valid_until = now() + interval '1 day' WHERE valid_until IS NOT NULL",
        "DELETE FROM prices",
        "INSERT INTO prices (pool, uncached_input, cached_input, output, device_second, valid_from, set_by) "
        "VALUES ('gpu', 1, 1, 1, 1, now() - interval '3 day', 'psql')",
    ],
)
async def test_the_database_keeps_the_history_whoever_connects(session: AsyncSession, statement: str) -> None:
    await session.execute(
        text(
            "INSERT INTO prices (pool, uncached_input, cached_input, output, device_second, valid_from, valid_until, "
            "set_by) VALUES ('gpu', 1, 1, 7, 1, now() - interval '2 day', now() - interval '1 day', 'op'), "
            "('gpu', 1, 1, 8, 1, now() - interval '1 day', NULL, 'op')"
        )
    )
    with pytest.raises(IntegrityError):
        await session.execute(text(statement))


async def test_prices_set_at_once_follow_one_another(committed_engine: AsyncEngine) -> None:
    async def one(output: int) -> None:
        async with transaction(committed_engine) as session:
            await price_service.set_price(session, price(output, "gpu"), by="op")

    await asyncio.gather(*(one(output) for output in range(12)))
    async with transaction(committed_engine) as session:
        rows = await history(session, "gpu")
    assert sorted(row[0] for row in rows) == list(range(12))
    assert [row[2] for row in rows[:-1]] == [row[1] for row in rows[1:]]
    assert rows[-1][2] is None


async def test_an_attempt_costs_what_was_in_force_when_it_finished(session: AsyncSession) -> None:
    everywhere = await price_service.set_price(session, price(1_000_000), by="op")
    planned = later(days=2)
    await price_service.set_price(session, price(3_000_000, "gpu", valid_from=planned), by="op")
    prices = await price_service.prices_between(session, everywhere.valid_from, later(days=9))
    use = Use(output=10)
    assert settled(prices, "gpu", everywhere.valid_from.timestamp(), use) == 10
    assert settled(prices, "gpu", planned.timestamp(), use) == 30
    assert settled(prices, "cpu", planned.timestamp(), use) == 10
    assert settled(prices, "gpu", everywhere.valid_from.timestamp() - 1, use) == 0
    before = await price_service.prices_between(session, later(days=-9), everywhere.valid_from)
    assert before == ()
    tenant = await make_tenant(session)
    assert set((await service.load_tenant_quotas(session, tenant.id)).prices) == set(prices)


async def test_f10_a_repeat_sets_no_second_price(session: AsyncSession) -> None:
    first = await price_service.set_price(session, price(5, "gpu"), by="op", idempotency_key="once")
    assert await price_service.set_price(session, price(5, "gpu"), by="op", idempotency_key="once") == first
    with pytest.raises(ConflictError, match="already made"):
        await price_service.set_price(session, price(6, "gpu"), by="op", idempotency_key="once")
    assert len(await history(session, "gpu")) == 1


async def test_lists_are_paged_and_narrowed_newest_first(session: AsyncSession) -> None:
    for day in range(5):
        await price_service.set_price(session, price(day, "gpu", valid_from=later(days=day + 1)), by="op")
    await price_service.set_price(session, price(77), by="op")
    seen, after = [], None
    while True:
        page = await price_service.list_prices(session, pool="gpu", limit=2, after=after)
        seen += [row.output for row in page.items]
        if (after := page.next) is None:
            break
    assert seen == [4, 3, 2, 1, 0]
    in_force = (await price_service.list_prices(session, at=later(days=2, hours=1))).items
    assert [(row.pool, row.output) for row in in_force] == [("gpu", 1), (None, 77)]
    assert [row.output for row in (await price_service.list_prices(session, pool="")).items] == [77]


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (price(-1), "output"),
        (price(LARGEST_RATE + 1), "output"),
        (price(1, " "), "pool"),
        (price(1, valid_from=datetime(2999, 1, 1)), "valid_from"),
    ],
)
async def test_a_price_that_cannot_be_is_refused_naming_the_field(
    session: AsyncSession, spec: PriceSpec, param: str
) -> None:
    with pytest.raises(TidegateError) as refused:
        await price_service.set_price(session, spec, by="op")
    assert refused.value.param == param
