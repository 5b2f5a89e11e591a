"""The Celery worker: background jobs, each one transaction, and the beat that starts them.

Layer: service. Knows how a job is run, retried, counted and logged; what it does is its domain's `tasks` module.
Never on the request path. Everything may run twice (a redelivered message, two beats, two workers), so every job
is idempotent by itself; the process tree dies with its parent, so a job may also end half-way at any line.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random
import socket
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery, Task, beat, signals
from celery.platforms import SecurityWarning
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import after_commit, create_engine, transaction
from controlplane.logs import configure_logging
from controlplane.outage import away
from controlplane.parent import die_with
from controlplane.settings import Settings
from controlplane.telemetry.taskstats import TaskStats

log = logging.getLogger("tidegate.worker")

DOMAINS = ("telemetry", "ledger", "admission", "canaries", "promptlog", "policy")
"""Domains with a `tasks` module."""
QUEUE = "tidegate"
VISIBILITY_TIMEOUT_S = 60
"""A message whose worker was killed is delivered again after this long, so jobs are shorter."""
LONGEST_JOB_S = 45.0
MOST_RETRIES = 5
LONGEST_PAUSE_S = 20.0
BEAT_INTERVAL_S = 1
BEAT_LOCK_S = 15
"""A beat that does not extend its lock within this time is dead to the others."""
BEAT_RESTART_S = 2.0


@dataclass(frozen=True, slots=True)
class JobContext:
    """What one run of a job works with. `holder` names this run in claims."""

    session: AsyncSession
    now: float
    holder: str
    publish: Callable[..., None]
    """publish(job name, *args): start another job once this one's transaction is committed."""
    settings: Settings
    engine: AsyncEngine
    """For transactions of their own: of what other processes must see before the job is over."""
    redis: Redis


class ExpectedEnd(Exception):  # noqa: N818 - it says how a run ended, not that something is wrong
    """A job raises (a subclass of) this to roll back and be done: nothing is wrong and nothing is to be retried."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kind of background work. `every_s` makes beat start it; what beat starts is not retried, the next comes."""

    name: str
    service: Callable[..., Awaitable[None]]
    """service(context, *args)"""
    every_s: float | None = None


class Runtime:
    """One process's event loop and connections, made on first use and never shared across a fork."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._runner = asyncio.Runner()
        self.engine: AsyncEngine = create_engine(settings, pool_size=2)
        self.redis: Redis = Redis.from_url(
            settings.redis_url.reveal(), socket_connect_timeout=2.0, socket_timeout=5.0, client_name="tidegate-worker"
        )
        self.stats = TaskStats(self.redis)

    def run(self, work: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(LONGEST_JOB_S):
                await work

        self._runner.run(bounded())

    def close(self) -> None:
        async def close() -> None:
            await self.engine.dispose()
            await self.redis.aclose()

        self._runner.run(close())
        self._runner.close()


class Worker(Celery):  # type: ignore[misc]  # Celery has no types
    """The Celery application of one deployment."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("tidegate", broker=settings.redis_url.reveal(), set_as_current=False)
        self.settings = settings
        self.main_pid = os.getpid()
        self._runtime: tuple[int, Runtime] | None = None

    def add(self, job: Job) -> None:
        """Register `job` as a task, and with beat when it has a period."""
        self.register_task(type(job.name, (JobTask,), {"name": job.name, "job": job, "__module__": __name__})())
        if job.every_s is not None:
            self.conf.beat_schedule[job.name] = {
                "task": job.name,
                "schedule": timedelta(seconds=job.every_s),
                "options": {"expires": 2 * job.every_s, "queue": QUEUE},
            }

    @property
    def runtime(self) -> Runtime:
        """This process's runtime."""
        if self._runtime is None or self._runtime[0] != os.getpid():
            self._runtime = (os.getpid(), Runtime(self.settings))
        return self._runtime[1]

    def close_runtime(self) -> None:
        if self._runtime is not None and self._runtime[0] == os.getpid():
            self._runtime[1].close()
        self._runtime = None


class JobTask(Task):  # type: ignore[misc]  # Celery has no types
    """Runs a job's service in one transaction of this process's loop: counted, logged, retried with jitter."""

    abstract = True
    ignore_result = True
    acks_late = True
    reject_on_worker_lost = True
    max_retries = MOST_RETRIES
    job: Job

    def run(self, *args: Any) -> None:
        runtime: Runtime = self.app.runtime
        began = time.monotonic()
        context = {"job": self.job.name, "job_id": self.request.id}
        try:
            runtime.run(self._transaction(runtime, args))
        except ExpectedEnd as end:
            log.info("%s: %s", self.job.name, end, extra=context)
            self._count(runtime, "done", began)
        except Exception as error:
            self._failed(runtime, error, began, context)
        else:
            self._count(runtime, "done", began)

    async def _transaction(self, runtime: Runtime, args: tuple[Any, ...]) -> None:
        async with transaction(runtime.engine) as session:

            def publish(name: str, *values: Any) -> None:
                async def send() -> None:
                    await asyncio.to_thread(self.app.send_task, name, args=values)

                after_commit(session, send)

            holder = f"{socket.gethostname()}:{os.getpid()}:{self.request.id}"
            context = JobContext(
                session, time.time(), holder, publish, self.app.settings, runtime.engine, runtime.redis
            )
            await self.job.service(context, *args)

    def _failed(self, runtime: Runtime, error: Exception, began: float, context: dict[str, Any]) -> None:
        again = self.job.every_s is None and self.request.retries < MOST_RETRIES
        self._count(runtime, "retried" if again else "failed", began)
        if away(error) is not None:
            log.warning("%s: a store is away: %s", self.job.name, type(error).__name__, extra=context)
        else:
            log.error("%s failed", self.job.name, exc_info=error, extra=context)
        if again:
            raise self.retry(exc=error, countdown=retry_pause(self.request.retries))
        raise error

    def _count(self, runtime: Runtime, outcome: str, began: float) -> None:
        runtime.run(runtime.stats.count(self.job.name, outcome, time.monotonic() - began))


def retry_pause(retries: int) -> float:
    """Seconds before the next attempt: doubling, bounded, half of it random."""
    return min(LONGEST_PAUSE_S, 2.0**retries) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


def create_worker(settings: Settings) -> Worker:
    """The application with every domain's jobs and the schedule of those that beat starts."""
    app = Worker(settings)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_default_queue=QUEUE,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_time_limit=VISIBILITY_TIMEOUT_S,
        worker_prefetch_multiplier=1,
        worker_max_tasks_per_child=5_000,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": VISIBILITY_TIMEOUT_S,
            "unacked_restore_interval": 2,
            "unacked_restore_throttle": 1,
            "socket_connect_timeout": 2.0,
            "socket_keepalive": True,
        },
        timezone="UTC",
        enable_utc=True,
        beat_schedule={},
        redbeat_redis_url=settings.redis_url.reveal(),
        redbeat_redis_options={"socket_connect_timeout": 2.0, "socket_timeout": 5.0},
        redbeat_key_prefix="tidegate:beat:",
        redbeat_lock_timeout=BEAT_LOCK_S,
        beat_max_loop_interval=BEAT_INTERVAL_S,
    )
    for domain in DOMAINS:
        for job in importlib.import_module(f"controlplane.{domain}.tasks").JOBS:
            app.add(job)
    return app


class BeatKeeper:
    """Beat in a thread of the worker's main process, started again whenever it ends.

    redbeat's lock in Redis lets only one beat of a deployment run; a beat that lost Redis or its lock dies, and
    without a keeper the worker would go on for good without a schedule.
    """

    def __init__(self, app: Worker) -> None:
        self._app = app
        self._stopping = threading.Event()
        self._service: beat.Service | None = None
        self._thread = threading.Thread(target=self._keep, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self) -> None:
        """Start the running beat's end, which comes when it wakes; harmless when repeated."""
        self._stopping.set()
        if self._service is not None:
            self._service.stop()

    def stop(self) -> None:
        """Let the running beat release its lock, if it does so at once."""
        self.ask()
        if self._thread.is_alive():  # a worker that never became ready has no beat
            self._thread.join(timeout=2 * BEAT_INTERVAL_S)

    def _keep(self) -> None:
        while not self._stopping.is_set():
            self._service = beat.Service(
                self._app, max_interval=BEAT_INTERVAL_S, scheduler_cls="redbeat.RedBeatScheduler"
            )
            try:
                self._service.start()
            except Exception as error:
                log.warning("beat ended and is started again: %s: %s", type(error).__name__, error)
            self._stopping.wait(BEAT_RESTART_S)


def run(settings: Settings, *, log_level: str = "INFO", concurrency: int = 1) -> None:
    """Run worker and beat until SIGTERM or Ctrl-C, then exit the process. Call it from the main thread."""
    configure_logging(settings)
    log.setLevel(log_level.upper())
    app = create_worker(settings)
    keeper = BeatKeeper(app)
    _connect(app, keeper)
    # Celery warns root although nothing but JSON is accepted, which is what makes root dangerous to it.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    controller = app.Worker(
        pool_cls="prefork",
        concurrency=concurrency,
        hostname=f"tidegate-{os.getpid()}@{socket.gethostname()}",
        loglevel=log_level.upper(),
        quiet=True,
        without_gossip=True,
        without_mingle=True,
    )
    try:
        controller.start()
    finally:
        keeper.stop()
    sys.exit(controller.exitcode or 0)


def _connect(app: Worker, keeper: BeatKeeper) -> None:
    """Attach to the signals of this process, for the rest of its life."""

    def logging_is_set_up(**_: Any) -> None:
        """Being connected keeps Celery from setting up its own."""

    def child_started(**_: Any) -> None:
        die_with(app.main_pid)

    def child_ends(**_: Any) -> None:
        app.close_runtime()

    def ready(**_: Any) -> None:
        keeper.start()
        log.info("worker is ready", extra={"jobs": ", ".join(sorted(app.conf.beat_schedule))})

    def shutting_down(**_: Any) -> None:
        keeper.ask()  # it ends while the pool does

    signals.setup_logging.connect(logging_is_set_up, weak=False)
    signals.worker_process_init.connect(child_started, weak=False)
    signals.worker_process_shutdown.connect(child_ends, weak=False)
    signals.worker_ready.connect(ready, weak=False)
    signals.worker_shutting_down.connect(shutting_down, weak=False)
