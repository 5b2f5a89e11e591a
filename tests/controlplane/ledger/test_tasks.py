"""The ledger's jobs as the worker runs them: twice, at once, and against somebody in the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from redis import Redis as SyncRedis

from controlplane.db import transaction
from controlplane.ledger import service, tasks
from controlplane.ledger.retention import DAYS_AHEAD
from controlplane.settings import Settings
from controlplane.telemetry.taskstats import KEY
from controlplane.worker import Worker, create_worker
from tests.conftest import make_settings
from tests.controlplane.telemetry.reports import usage
from tests.services import Databases


@pytest.fixture
def own_settings(postgres: Databases, migrated_template: str, settings: Settings) -> Iterator[Settings]:
    """A deployment whose partitions this test may change."""
    url = postgres.create("ledger_jobs", template=migrated_template)
    yield make_settings(settings.home, database_url=url, redis_url=settings.redis_url.reveal())
    postgres.drop(url)


@pytest.fixture
def app(own_settings: Settings) -> Iterator[Worker]:
    made = create_worker(own_settings)
    yield made
    made.close_runtime()


@pytest.fixture
def counted(valkey: str) -> Callable[[str], int]:
    def read(name: str) -> int:
        with SyncRedis.from_url(valkey) as client:
            return int(client.hget(KEY, name) or 0)

    return read


def days(settings: Settings) -> list[str]:
    with psycopg.connect(settings.database_url.reveal()) as connection:
        query = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_ledger'::regclass ORDER BY 1"
        return [row[0] for row in connection.execute(query)]


def test_f38_the_partition_job_twice_is_as_good_as_once(
    app: Worker, own_settings: Settings, counted: Callable[[str], int]
) -> None:
    last = f"usage_ledger_p{datetime.now(UTC) + timedelta(days=DAYS_AHEAD):%Y%m%d}"
    with psycopg.connect(own_settings.database_url.reveal()) as connection:
        connection.execute(f"DROP TABLE {last}")
    app.tasks[tasks.KEEP_PARTITIONS].apply(throw=True)
    found = days(own_settings)
    assert last in found
    app.tasks[tasks.KEEP_PARTITIONS].apply(throw=True)
    assert days(own_settings) == found
    assert (counted(f"{tasks.KEEP_PARTITIONS} done"), counted(f"{tasks.KEEP_PARTITIONS} failed")) == (2, 0)


def test_f39_a_run_while_another_is_at_it_or_a_reader_is_in_the_way_ends_without_harm(
    app: Worker, own_settings: Settings, counted: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = f"usage_ledger_p{datetime.now(UTC) + timedelta(days=DAYS_AHEAD):%Y%m%d}"
    with psycopg.connect(own_settings.database_url.reveal(), autocommit=True) as connection:
        connection.execute(f"DROP TABLE {last}")
        for statement in (
            f"SELECT pg_advisory_xact_lock({service.partitions.LOCK})",
            "LOCK TABLE usage_ledger_default IN ACCESS SHARE MODE",
        ):
            with connection.transaction():
                connection.execute(statement)
                app.tasks[tasks.KEEP_PARTITIONS].apply(throw=True)
            assert last not in days(own_settings)
    app.tasks[tasks.KEEP_PARTITIONS].apply(throw=True)
    assert last in days(own_settings)
    assert counted(f"{tasks.KEEP_PARTITIONS} failed") == 0


def test_f8_a_wrong_sum_of_yesterday_is_said(
    app: Worker, own_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)

    async def seed() -> None:
        async with transaction(app.runtime.engine) as session:
            await service.record(session, [usage("one", tenant="acme", finished_at=yesterday.timestamp())])
        await app.runtime.engine.dispose()

    asyncio.run(seed())
    with caplog.at_level(logging.ERROR, "tidegate.ledger"):
        app.tasks[tasks.CHECK_SUMS].apply(throw=True)
        assert caplog.messages == []
        with psycopg.connect(own_settings.database_url.reveal()) as connection:
            connection.execute("UPDATE usage_daily SET output_tokens = 6")
        app.tasks[tasks.CHECK_SUMS].apply(throw=True)
    (said,) = caplog.messages
    assert "tenant acme" in said and "35 tokens in rows, 36 in the sum" in said


def test_claims_are_forgotten_in_batches(app: Worker, own_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(app, "send_task", lambda name, args: sent.append(name))
    monkeypatch.setattr(tasks, "BATCH", 10)
    with psycopg.connect(own_settings.database_url.reveal()) as connection:
        old = "now() - interval '1 year'"
        connection.execute(f"INSERT INTO usage_attempts SELECT n::text, {old} FROM generate_series(1, 15) AS n")
    for left in (5, 0):
        app.tasks[tasks.FORGET_CLAIMS].apply(throw=True)
        with psycopg.connect(own_settings.database_url.reveal()) as connection:
            assert connection.execute("SELECT count(*) FROM usage_attempts").fetchone() == (left,)
    assert sent == [tasks.FORGET_CLAIMS]
