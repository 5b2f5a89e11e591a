"""Every registered job is idempotent by its claim, and two beats start each once (F38, F39): generated over all tasks.

A job that beat does not start must be started by another one here: a new one fails until the seeds give it work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql

from controlplane.canaries import tasks as canaries
from controlplane.db import create_engine, transaction
from controlplane.settings import Settings
from controlplane.telemetry import tasks as telemetry
from controlplane.telemetry.intake import store
from controlplane.worker import Worker, create_worker
from dataplane.protocol import GatewayWindow
from tests.conftest import make_settings
from tests.controlplane.telemetry.reports import counters, gateway_report, series
from tests.services import Databases

OLD_MINUTE = int(time.time()) // 60 * 60 - 1800
Message = tuple[str, tuple[Any, ...]]


@dataclass
class Process:
    """A worker, and the messages that its jobs sent."""

    app: Worker
    sent: list[Message] = field(default_factory=list)

    def run(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.app.tasks[name].apply(args=list(args), throw=True)

    @property
    def beat(self) -> list[str]:
        return sorted(self.app.conf.beat_schedule)


@pytest.fixture
def own(postgres: Databases, migrated_template: str, settings: Settings) -> Iterator[Settings]:
    """A deployment whose rows and partitions this test may change, with windows to be rolled up."""
    url = postgres.create("jobs", template=migrated_template)
    made = make_settings(settings.home, database_url=url, redis_url=settings.redis_url.reveal())
    asyncio.run(seed(made))
    yield made
    postgres.drop(url)


async def seed(settings: Settings) -> None:
    engine = create_engine(settings, pooled=False)
    async with transaction(engine) as session:
        for start in (OLD_MINUTE, OLD_MINUTE + 60):
            window = GatewayWindow(start=start, series=[series("acme", counters(accepted=1))])
            await store(session, [gateway_report([window])], start + 5.0)
    await engine.dispose()


@pytest.fixture
def processes(own: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    made = []
    for _ in range(2):
        process = Process(create_worker(own))
        sent = process.sent
        monkeypatch.setattr(process.app, "send_task", lambda name, args, sent=sent: sent.append((name, tuple(args))))
        made.append(process)
    yield made
    for process in made:
        process.app.close_runtime()


def rows(settings: Settings) -> dict[str, str]:
    """What every table holds, as one sum each."""
    with psycopg.connect(settings.database_url.reveal()) as connection:
        tables = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
        ).fetchall()
        query = "SELECT md5(coalesce(string_agg(t::text, '|' ORDER BY t::text), '')) FROM {} t"
        return {
            table: str(connection.execute(sql.SQL(query).format(sql.Identifier(table))).fetchone())
            for (table,) in tables
        }


def work_off(process: Process) -> list[Message]:
    """Tick beat and run all that its jobs start, until a tick starts nothing; all messages, in order."""
    done: list[Message] = []
    for _ in range(10):
        waiting: list[Message] = [(name, ()) for name in process.beat]
        ticked = len(waiting)
        while waiting:
            message = waiting.pop(0)
            process.run(*message)
            done.append(message)
            ticked += len(process.sent)
            waiting += process.sent
            process.sent.clear()
            assert len(done) < 500, "jobs start each other without end"
        if ticked == len(process.beat):
            return done
    raise AssertionError("every tick starts something new")


def test_f38_every_job_delivered_again_changes_nothing(own: Settings, processes: list[Process]) -> None:
    first, second = processes
    before = rows(own)
    messages = work_off(first)
    assert {name for name, _ in messages} == {name for name in first.app.tasks if not name.startswith("celery.")}
    after = rows(own)
    assert after != before
    for name, args in messages:
        second.run(name, args)
        assert rows(own) == after, f"{name}{args} delivered again changes something"
    assert second.sent == [], "what is done is not started again"


def test_f39_two_beats_at_once_start_each_job_and_window_once(own: Settings, processes: list[Process]) -> None:
    with ThreadPoolExecutor(2) as together:
        for name in processes[0].beat:
            list(together.map(lambda process, name=name: process.run(name), processes))
    started = [(name, *args[:2]) for process in processes for name, args in process.sent]
    assert sorted(started) == sorted(set(started))
    assert {name for name, *_ in started} == {telemetry.ROLL_UP, canaries.RUN}


@pytest.mark.parametrize("job", [telemetry.ROLL_UP, canaries.RUN])
def test_f38_a_stale_epoch_is_refused(own: Settings, processes: list[Process], job: str) -> None:
    process, other = processes
    for name in process.beat:
        process.run(name)
    claim = next(args for name, args in process.sent if name == job)
    table = {telemetry.ROLL_UP: "rollup_claims", canaries.RUN: "canary_runs"}[job]
    with psycopg.connect(own.database_url.reveal(), autocommit=True) as connection:
        connection.execute(sql.SQL("UPDATE {} SET fence = fence + 1").format(sql.Identifier(table)))
    before = rows(own)
    other.run(job, claim)
    assert rows(own) == before
