"""The worker: one transaction a job, retries, beat, and nothing left behind when it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from controlplane.admission.tasks import PLAN_SHARES
from controlplane.canaries import tasks as canaries
from controlplane.db import transaction
from controlplane.fleet import service as fleet
from controlplane.ledger import tasks as ledger
from controlplane.policy import tasks as policy
from controlplane.promptlog import tasks as promptlog
from controlplane.settings import Settings
from controlplane.telemetry import tasks
from controlplane.telemetry.intake import MINUTE_JOB, store
from controlplane.telemetry.taskstats import KEY
from controlplane.worker import (
    LONGEST_JOB_S,
    LONGEST_PAUSE_S,
    MOST_RETRIES,
    VISIBILITY_TIMEOUT_S,
    ExpectedEnd,
    Job,
    JobContext,
    Worker,
    create_worker,
    retry_pause,
)
from dataplane.protocol import GatewayWindow
from tests.controlplane.telemetry.reports import counters, gateway_report, series

CHECKOUT = Path(__file__).parents[2]
OLD_MINUTE = int(time.time()) // 60 * 60 - 1800
"""Half an hour ago: closed by any clock, inside retention."""


@pytest.fixture
def app(settings: Settings) -> Iterator[Worker]:
    made = create_worker(settings)
    yield made
    made.close_runtime()


@pytest.fixture
def stats(valkey: str) -> Callable[[str], int]:
    """How often something ("<task> <outcome>") was counted."""

    def read(name: str) -> int:
        with SyncRedis.from_url(valkey) as client:
            return int(client.hget(KEY, name) or 0)

    return read


def pools(settings: Settings) -> list[str]:
    with psycopg.connect(settings.database_url.reveal()) as connection:
        return [row[0] for row in connection.execute("SELECT name FROM pools ORDER BY name")]


async def make_pool(context: JobContext, name: str) -> None:
    await fleet.ensure_pool(context.session, name, "model")


async def make_pool_and_end(context: JobContext, name: str) -> None:
    await fleet.ensure_pool(context.session, name, "model")
    raise ExpectedEnd("somebody else did it")


async def make_pool_and_fail(context: JobContext, name: str) -> None:
    await fleet.ensure_pool(context.session, name, "model")
    raise RuntimeError("a defect")


def test_a_job_is_one_transaction_committed_at_its_end(
    app: Worker, settings: Settings, stats: Callable[[str], int]
) -> None:
    app.add(Job("test.make", make_pool))
    app.tasks["test.make"].apply(args=["one"], throw=True)
    assert pools(settings) == ["one"]
    assert stats("test.make done") == 1


def test_an_expected_end_rolls_back_and_is_no_failure(
    app: Worker, settings: Settings, stats: Callable[[str], int]
) -> None:
    app.add(Job("test.end", make_pool_and_end))
    app.tasks["test.end"].apply(args=["one"], throw=True)
    assert pools(settings) == []
    assert (stats("test.end done"), stats("test.end failed")) == (1, 0)


def test_a_failing_job_rolls_back_and_is_tried_again_a_bounded_number_of_times(
    app: Worker, settings: Settings, stats: Callable[[str], int]
) -> None:
    app.add(Job("test.fail", make_pool_and_fail))
    result = app.tasks["test.fail"].apply(args=["one"])
    assert result.failed()
    assert pools(settings) == []
    assert (stats("test.fail retried"), stats("test.fail failed")) == (MOST_RETRIES, 1)


def test_a_job_that_recovers_is_done(app: Worker, settings: Settings, stats: Callable[[str], int]) -> None:
    attempts = []

    async def flaky(context: JobContext, name: str) -> None:
        attempts.append(name)
        await fleet.ensure_pool(context.session, f"{name}-{len(attempts)}", "model")
        if len(attempts) < 3:
            raise ConnectionError("away")

    app.add(Job("test.flaky", flaky))
    assert app.tasks["test.flaky"].apply(args=["one"]).successful()
    assert pools(settings) == ["one-3"], "what failed attempts wrote is gone"
    assert (stats("test.flaky retried"), stats("test.flaky done")) == (2, 1)


def test_what_beat_starts_is_not_retried_because_the_next_tick_comes(app: Worker, stats: Callable[[str], int]) -> None:
    app.add(Job("test.tick", make_pool_and_fail, every_s=60.0))
    assert app.tasks["test.tick"].apply(args=["one"]).failed()
    assert (stats("test.tick retried"), stats("test.tick failed")) == (0, 1)


def test_other_jobs_are_published_after_the_commit_and_not_after_a_rollback(
    app: Worker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(app, "send_task", lambda name, args: seen.append((name, pools(settings))))

    async def chain(context: JobContext, name: str, fail: bool) -> None:
        await make_pool(context, name)
        context.publish("test.next", name)
        if fail:
            raise ExpectedEnd("no")

    app.add(Job("test.chain", chain))
    app.tasks["test.chain"].apply(args=["one", False], throw=True)
    assert seen == [("test.next", ["one"])], "the row was visible when the message left"
    app.tasks["test.chain"].apply(args=["two", True], throw=True)
    assert len(seen) == 1


def test_retry_pauses_grow_are_bounded_and_differ() -> None:
    pauses = [[retry_pause(n) for _ in range(50)] for n in range(12)]
    assert all(
        0.5 * min(LONGEST_PAUSE_S, 2.0**n) <= one <= LONGEST_PAUSE_S for n, row in enumerate(pauses) for one in row
    )
    assert all(len(set(row)) > 1 for row in pauses)


def test_a_job_ends_before_its_message_is_delivered_again(app: Worker) -> None:
    assert LONGEST_JOB_S < VISIBILITY_TIMEOUT_S
    conf = app.conf
    assert conf.broker_transport_options["visibility_timeout"] == VISIBILITY_TIMEOUT_S
    assert conf.broker_transport_options["unacked_restore_interval"] == 2
    assert conf.task_acks_late and conf.task_reject_on_worker_lost and conf.worker_prefetch_multiplier == 1
    assert conf.accept_content == ["json"], "pickle would make running as root dangerous"
    ledger_jobs = {ledger.KEEP_PARTITIONS, ledger.FORGET_CLAIMS, ledger.CHECK_SUMS}
    other_jobs = {policy.FORGET, PLAN_SHARES, promptlog.FORGET, canaries.CLAIM}
    assert set(conf.beat_schedule) == {tasks.CLAIM_ROLLUPS, tasks.RETENTION, *ledger_jobs, *other_jobs}


# --------------------------------------------------------------------------------------------------------------
# As processes
# --------------------------------------------------------------------------------------------------------------


class Workers:
    """`tidegate worker` processes of one deployment."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "TMPDIR": str(folder),  # a killed worker cannot clean up what Celery's pool puts there
            "DATABASE_URL": settings.database_url.reveal(),
            "REDIS_URL": settings.redis_url.reveal(),
            "TIDEGATE_HOME": str(settings.home),
            "TIDEGATE_INTERNAL_TOKEN": settings.internal_token.reveal(),
            "TIDEGATE_SESSION_SECRET": settings.session_secret.reveal(),
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        with self.log(len(self.running)).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "controlplane", "worker"],
                env=self._environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        self.running.append(process)
        return process

    def log(self, number: int) -> Path:
        return self._folder / f"worker-{number}.log"

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(settings, tmp_path)
    yield made
    made.end()


async def until(met: Callable[[], object], what: str) -> None:
    """Wait for `met`, at most as long as a loaded machine may take."""
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(met):
            await asyncio.sleep(0.1)
    assert what


async def seed(app: Worker, minutes: int) -> None:
    """Rows of closed minutes that are due."""
    engine = app.runtime.engine
    async with transaction(engine) as session:
        for n in range(minutes):
            start = OLD_MINUTE + 60 * n
            window = GatewayWindow(start=start, series=[series("acme", counters(accepted=n))])
            await store(session, [gateway_report([window])], start + 5.0)
    await engine.dispose()


def claims(settings: Settings) -> list[tuple[int, bool]]:
    """(fence, done) of every minute."""
    with psycopg.connect(settings.database_url.reveal()) as connection:
        query = "SELECT fence, touched = done FROM rollup_claims WHERE job = %s"
        return [(row[0], row[1]) for row in connection.execute(query, [MINUTE_JOB])]


async def test_f39_two_workers_with_beat_roll_each_window_up_once(
    settings: Settings, app: Worker, workers: Workers, redis: Redis, stats: Callable[[str], int]
) -> None:
    await seed(app, 5)
    began = time.monotonic()
    workers.start(), workers.start()
    await until(lambda: [done for _, done in claims(settings)] == [True] * 5, "all windows are rolled up")
    ticks = stats(f"{tasks.CLAIM_ROLLUPS} done")
    assert claims(settings) == [(1, True)] * 5
    assert stats(f"{tasks.ROLL_UP} done") <= 5
    assert ticks <= 1 + (time.monotonic() - began) / tasks.TICK_S, "one beat ticks, the other waits for its lock"


async def test_killing_the_worker_leaves_no_process(settings: Settings, workers: Workers, redis: Redis) -> None:
    process = workers.start()
    await until(lambda: b"worker is ready" in workers.log(0).read_bytes(), "the worker is ready")
    family = psutil.Process(process.pid).children(recursive=True)
    assert family, "the pool has a child"
    process.kill()
    process.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, family, 20)
    assert alive == [] and len(gone) == len(family)


async def test_a_worker_stops_in_order_and_without_warnings(settings: Settings, workers: Workers, redis: Redis) -> None:
    process = workers.start()
    await until(lambda: b"worker is ready" in workers.log(0).read_bytes(), "the worker is ready")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 0
    printed = workers.log(0).read_text()
    assert "Warning" not in printed and "Traceback" not in printed
    assert settings.internal_token.reveal() not in printed


async def test_a_killed_pool_child_is_replaced_and_work_goes_on(
    settings: Settings, app: Worker, workers: Workers, redis: Redis
) -> None:
    process = workers.start()
    await until(lambda: b"worker is ready" in workers.log(0).read_bytes(), "the worker is ready")
    for child in psutil.Process(process.pid).children():
        child.kill()
    await seed(app, 2)
    await until(lambda: [done for _, done in claims(settings)] == [True] * 2, "all windows are rolled up")
    assert process.poll() is None


async def test_beat_survives_losing_its_lock(settings: Settings, workers: Workers, redis: Redis) -> None:
    workers.start()
    await until(lambda: b"worker is ready" in workers.log(0).read_bytes(), "the worker is ready")
    lock = "tidegate:beat::lock"
    async with asyncio.timeout(60):
        while not await redis.delete(lock):
            await asyncio.sleep(0.1)
    await until(lambda: b"beat ended and is started again" in workers.log(0).read_bytes(), "beat noticed")
    async with asyncio.timeout(60):
        while not await redis.exists(lock):
            await asyncio.sleep(0.1)


def test_the_control_plane_never_loads_torch_for_the_worker() -> None:
    code = "import sys, controlplane.worker, controlplane.telemetry.tasks; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
