"""The ledger by day: every attempt one row whoever reports it and when it says it ended; partitions come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta

import psycopg
import pytest
from alembic import command
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from controlplane.db import driver_url, transaction
from controlplane.ledger import partitions, service
from controlplane.ledger.retention import CLAIMS_KEPT_S, DAYS_AHEAD, DAYS_KEPT, MOST_AHEAD_S, OLDEST_RECORD_S
from controlplane.migrate import alembic_config, current, upgrade
from controlplane.settings import Secret
from controlplane.telemetry.validation import RefusedError, check_usage_time
from tests.controlplane.ledger.test_service import some_usage
from tests.controlplane.telemetry.reports import usage
from tests.services import Databases

DAY = timedelta(days=1)
NOW = datetime.now(UTC).replace(hour=12)


@pytest.fixture
async def engine_of_its_own(postgres: Databases, migrated_template: str) -> AsyncIterator[AsyncEngine]:
    """A database whose partitions this test may change."""
    url = postgres.create("partitions", template=migrated_template)
    engine = create_async_engine(driver_url(url, "asyncpg"), poolclass=NullPool)
    yield engine
    await engine.dispose()
    postgres.drop(url)


async def keep(engine: AsyncEngine, now: datetime, most: int = 1000) -> partitions.Changed | None:
    async with transaction(engine) as session:
        return await service.keep_partitions(session, now.timestamp(), most=most)


async def value(engine: AsyncEngine, query: str) -> int:
    async with transaction(engine) as session:
        return int(await session.scalar(text(query)) or 0)


async def record(engine: AsyncEngine, *records: object) -> int:
    async with transaction(engine) as session:
        return len((await service.record(session, records)).stored)  # type: ignore[arg-type]


async def test_f38_two_ingesters_with_different_ends_of_the_same_attempts_bill_each_once(
    committed_engine: AsyncEngine,
) -> None:
    """A gateway and a replica may report one attempt with ends on two days: no unique key of a partition sees both."""
    midnight = datetime(2023, 11, 15, tzinfo=UTC).timestamp()

    async def store(ingester: int) -> int:
        rng, stored = random.Random(ingester), 0
        attempts = rng.sample(range(60), 60)
        for begin in range(0, 60, 15):
            batch = [
                usage(f"a{n}", started_at=midnight - 50, finished_at=midnight + (ingester - 1.5) * 20, output_tokens=7)
                for n in attempts[begin : begin + 15]
            ]
            stored += await record(committed_engine, *batch)
        return stored

    assert sum(await asyncio.gather(*(store(ingester) for ingester in range(4)))) == 60
    assert await value(committed_engine, "SELECT count(*) FROM usage_ledger") == 60
    assert await value(committed_engine, "SELECT sum(output_tokens) FROM usage_ledger") == 420
    async with transaction(committed_engine) as session:
        assert await service.check_sums(session, date(2023, 11, 14), date(2023, 11, 16)) == []
        since = datetime(2023, 11, 1, tzinfo=UTC)
        assert (await service.sum_since(session, tenant="demo", since=since)).output_tokens == 420


async def test_f38_a_crash_between_claim_and_commit_leaves_neither(committed_engine: AsyncEngine) -> None:
    with pytest.raises(RuntimeError):
        async with transaction(committed_engine) as session:
            await service.record(session, [usage("lost")])
            raise RuntimeError("the process ends here")
    assert await value(committed_engine, "SELECT count(*) FROM usage_attempts") == 0
    assert await value(committed_engine, "SELECT count(*) FROM usage_daily") == 0
    assert await record(committed_engine, usage("lost")) == 1


async def test_partitions_are_made_ahead_and_dropped_with_their_sums(engine_of_its_own: AsyncEngine) -> None:
    engine = engine_of_its_own
    await keep(engine, NOW)
    async with transaction(engine) as session:
        found = await partitions.days(session)
    assert {NOW.date() + n * DAY for n in range(-1, DAYS_AHEAD + 1)} <= set(found)
    await record(engine, usage("today", finished_at=NOW.timestamp()))
    assert await value(engine, "SELECT count(*) FROM usage_ledger_default") == 0
    assert await keep(engine, NOW) == ([], [], 0), "a second run finds nothing to do"
    later = NOW + (DAYS_KEPT + 2) * DAY
    changed = await keep(engine, later)
    assert changed is not None and NOW.date() in changed.dropped
    assert min(changed.made) == later.date() - DAY
    for table in ("usage_ledger", "usage_daily"):
        assert await value(engine, f"SELECT count(*) FROM {table}") == 0
    assert await record(engine, usage("today", finished_at=later.timestamp())) == 0, "its claim outlives the row"


async def test_a_run_is_bounded(engine_of_its_own: AsyncEngine) -> None:
    changed = await keep(engine_of_its_own, NOW + (DAYS_KEPT + 40) * DAY, most=3)
    assert changed is not None
    assert (len(changed.made), len(changed.dropped)) == (3, 3)


async def test_a_row_without_a_partition_is_kept_and_moves_when_its_day_gets_one(
    engine_of_its_own: AsyncEngine, rng: random.Random
) -> None:
    engine = engine_of_its_own
    records = some_usage(rng, 200)
    await record(engine, *records)
    assert await value(engine, "SELECT count(*) FROM usage_ledger_default") == 200
    with pytest.raises(DBAPIError, match="append-only"):
        await value(engine, "WITH gone AS (DELETE FROM usage_ledger_default RETURNING 1) SELECT count(*) FROM gone")
    changed = await keep(engine, datetime(2023, 11, 20, tzinfo=UTC))
    assert changed is not None and {date(2023, 11, 14), date(2023, 11, 15)} <= set(changed.made)
    assert await value(engine, "SELECT count(*) FROM usage_ledger_default") == 0
    assert await value(engine, "SELECT count(*) FROM usage_ledger") == 200
    for statement in ("DELETE FROM usage_ledger RETURNING 1", "DELETE FROM usage_ledger_p20231114 RETURNING 1"):
        with pytest.raises(DBAPIError, match="append-only"):
            await value(engine, f"WITH gone AS ({statement}) SELECT count(*) FROM gone")
    async with transaction(engine) as session:
        assert await service.check_sums(session, date(2023, 11, 1), date(2023, 12, 1)) == []
    await record(engine, usage("later", finished_at=datetime(2030, 1, 1, tzinfo=UTC).timestamp()))
    assert await value(engine, "SELECT count(*) FROM usage_ledger_default") == 1, "there is a default partition again"


async def test_a_day_with_more_rows_than_can_be_moved_stays_readable_where_it_is(
    engine_of_its_own: AsyncEngine, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "MOST_MOVED", 10)
    await record(engine_of_its_own, *some_usage(rng, 60))
    changed = await keep(engine_of_its_own, NOW)
    assert changed is not None and changed.left_in_default == 60
    assert await value(engine_of_its_own, "SELECT count(*) FROM usage_ledger") == 60


async def test_f39_two_workers_make_each_partition_once(engine_of_its_own: AsyncEngine) -> None:
    later = NOW + 100 * DAY
    runs = await asyncio.gather(*(keep(engine_of_its_own, later) for _ in range(4)))
    made = [day for changed in runs if changed is not None for day in changed.made]
    assert sorted(made) == sorted(set(made))
    assert later.date() + DAYS_AHEAD * DAY in made


async def test_f39_who_comes_second_ends_at_once(engine_of_its_own: AsyncEngine) -> None:
    async with transaction(engine_of_its_own) as first:
        assert await partitions.try_lock(first)
        assert await keep(engine_of_its_own, NOW + 100 * DAY) is None


async def test_claims_go_only_when_nothing_late_can_come_any_more(session: AsyncSession) -> None:
    assert CLAIMS_KEPT_S > OLDEST_RECORD_S + MOST_AHEAD_S
    await service.record(session, [usage("old"), usage("new")])
    await session.execute(
        text("UPDATE usage_attempts SET claimed_at = now() - make_interval(secs => :age) WHERE attempt_id = 'old'"),
        {"age": CLAIMS_KEPT_S + 60},
    )
    assert await service.forget_claims(session, limit=100) == 1
    assert await service.forget_claims(session, limit=100) == 0
    assert await service.record(session, [usage("new")]) == ([], 0)


def test_a_record_from_beyond_that_time_is_refused() -> None:
    now = 1_700_000_000.0
    check_usage_time(usage(finished_at=now - OLDEST_RECORD_S + 1), now)
    check_usage_time(usage(finished_at=now + MOST_AHEAD_S - 1), now)
    for wrong in (now - OLDEST_RECORD_S - 1, now + MOST_AHEAD_S + 1):
        with pytest.raises(RefusedError):
            check_usage_time(usage(finished_at=wrong), now)


@pytest.mark.parametrize("change", ["attempts = attempts + 1", "output_tokens = output_tokens - 1"])
async def test_the_check_names_a_sum_that_is_not_its_rows(session: AsyncSession, change: str) -> None:
    await service.record(session, [usage("one", tenant="acme"), usage("two", tenant="globex")])
    assert await service.check_sums(session, date(2023, 11, 14), date(2023, 11, 15)) == []
    await session.execute(text(f"UPDATE usage_daily SET {change} WHERE tenant = 'acme'"))
    (wrong,) = await service.check_sums(session, date(2023, 11, 14), date(2023, 11, 15))
    assert (wrong.tenant, wrong.ledger_attempts, wrong.ledger_tokens) == ("acme", 1, 35)
    await session.execute(text("DELETE FROM usage_daily WHERE tenant = 'acme'"))
    (wrong,) = await service.check_sums(session, date(2023, 11, 14), date(2023, 11, 15))
    assert (wrong.daily_attempts, wrong.daily_tokens) == (0, 0)


async def test_rows_of_before_are_moved_claimed_and_summed(postgres: Databases, rng: random.Random) -> None:
    url = Secret(postgres.create("moved"))
    upgrade(url, "0003")
    records = some_usage(rng, 300)
    columns = list(records[0].__struct_fields__)
    places = ", ".join("to_timestamp(%s)" if name.endswith("_at") else "%s" for name in columns)
    with psycopg.connect(url.reveal()) as connection, connection.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO usage_ledger ({', '.join(columns)}) VALUES ({places})",
            [
                [str(getattr(one, name)) if name == "basis" else getattr(one, name) for name in columns]
                for one in records
            ],
        )
        before = cursor.execute("SELECT * FROM usage_ledger ORDER BY attempt_id").fetchall()
    upgrade(url)
    assert (await asyncio.to_thread(current, url)) is not None
    engine = create_async_engine(driver_url(url.reveal(), "asyncpg"), poolclass=NullPool)
    async with transaction(engine) as session:
        after = await session.execute(text("SELECT * FROM usage_ledger ORDER BY attempt_id"))
        assert [(*row, None) for row in before] == [tuple(row) for row in after], "unpriced"
        assert await session.scalar(text("SELECT count(*) FROM usage_ledger_default")) == 0
        assert await session.scalar(text("SELECT count(*) FROM usage_daily")) > 50
        assert await service.check_sums(session, date(2023, 11, 1), date(2023, 12, 1)) == []
        assert await service.record(session, records) == ([], 0), "what was billed before is not billed again"
    await engine.dispose()
    command.downgrade(alembic_config(url), "0003")
    with psycopg.connect(url.reveal()) as connection:
        assert connection.execute("SELECT * FROM usage_ledger ORDER BY attempt_id").fetchall() == before
    postgres.drop(url.reveal())
