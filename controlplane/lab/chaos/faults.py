"""The faults: how each is injected and lifted, what it may do to requests, and what must show it.

Layer: service. `inject` blocks while the fault lasts and returns when it is lifted; what recovers by itself does so
afterwards.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from controlplane.lab.chaos import watch
from controlplane.lab.chaos.checks import NOTHING_ALLOWED, Allowed
from controlplane.lab.chaos.deployment import ENGINES, GATEWAYS, Deployment, faketime
from controlplane.local.errors import LocalError

STEPS_S = (120, -90)
TASK_WITHIN_S = 40.0
WORKER_AWAY_S = 24.0
"""Longer than jobs may stand still unnoticed."""

REDIS_CODES = frozenset({"503 quota_store_unavailable", "503 quota_use_unknown"})
ENGINE_CODES = frozenset(
    {"503 no_capacity", "503 replica_unavailable", "503 upstream_unreachable", "503 upstream_reset"}
    | {"502 upstream_truncated", "502 upstream_reset"}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject(deployment, seconds)`; `seconds` of the outage are the second number in a quick run."""

    name: str
    what: str
    inject: Callable[[Deployment, float], None]
    seconds: tuple[float, float]
    expected: tuple[str, ...]
    allowed: Allowed = NOTHING_ALLOWED
    missing: Callable[[], str] = str
    """Why it cannot be injected here, empty when it can."""


def _redis_with_data(deployment: Deployment, seconds: float) -> None:
    deployment.kill("valkey")
    deployment.hold(seconds)
    deployment.turn(0.5)


def _redis_empty(deployment: Deployment, seconds: float) -> None:
    deployment.kill("valkey")
    deployment.hold(seconds / 2)
    shutil.rmtree(deployment.stack.home.valkey / "appendonlydir")
    deployment.hold(seconds / 2)
    deployment.turn(0.5)


def _postgres_frozen(deployment: Deployment, seconds: float) -> None:
    deployment.signal_tree("postgres", signal.SIGSTOP)
    try:
        deployment.turn(seconds)
    finally:
        deployment.signal_tree("postgres", signal.SIGCONT)


def _postgres_shut_down(deployment: Deployment, seconds: float) -> None:
    deployment.signal_tree("postgres", signal.SIGINT)
    deployment.hold(seconds)
    deployment.turn(0.5)


def _kill(unit: str) -> Callable[[Deployment, float], None]:
    def inject(deployment: Deployment, seconds: float) -> None:
        deployment.kill(unit)
        deployment.hold(seconds)
        deployment.turn(0.5)

    return inject


def _worker_mid_task(deployment: Deployment, seconds: float) -> None:
    """Jobs cannot end while Postgres is frozen: the worker is killed when one is seen to run."""
    inspect = Celery("chaos", broker=deployment.settings.redis_url.reveal()).control.inspect(timeout=0.5, limit=1)

    def in_a_task() -> bool:
        try:
            return any((inspect.active() or {}).values())
        except (OperationalError, RedisError, OSError):
            return False

    deployment.signal_tree("postgres", signal.SIGSTOP)
    try:
        caught = deployment.until(in_a_task, TASK_WITHIN_S)
        deployment.kill("worker")
    finally:
        deployment.signal_tree("postgres", signal.SIGCONT)
    if not caught:
        raise LocalError(f"the worker began no job within {TASK_WITHIN_S:.0f} s")
    deployment.hold(seconds)
    deployment.turn(0.5)


def _clock_steps(deployment: Deployment, seconds: float) -> None:
    clock = deployment.stack.clock
    for step in (*STEPS_S, 0):
        fresh = clock.with_suffix(".new")
        fresh.write_text(f"{step:+d}\n", encoding="ascii")
        fresh.rename(clock)
        if step:
            deployment.turn(seconds / len(STEPS_S))


def _no_faketime() -> str:
    return "" if faketime() is not None else "libfaketime is not installed (apt-get install faketime)"


FAULTS = (
    Fault(
        "redis-restart", "Redis killed, back with its data", _redis_with_data, (10.0, 4.0),
        (watch.REDIS_AWAY, watch.LIMITS_DECIDE), Allowed(REDIS_CODES),
    ),
    Fault(
        "redis-empty", "Redis killed, back empty", _redis_empty, (10.0, 4.0),
        (watch.REDIS_AWAY, watch.LIMITS_DECIDE), Allowed(REDIS_CODES),
    ),
    Fault(
        "postgres-frozen", "Postgres stopped (SIGSTOP)", _postgres_frozen, (60.0, 8.0),
        (watch.POSTGRES_AWAY,),
    ),
    Fault(
        "postgres-shutdown", "Postgres shut down", _postgres_shut_down, (60.0, 6.0),
        (watch.POSTGRES_AWAY, watch.POLICY_UNHEARD),
    ),
    Fault(
        "gateway-kill", "a gateway killed (kill -9)", _kill(GATEWAYS[0]), (10.0, 3.0),
        (watch.GATEWAY_DOWN,), Allowed(cut=True, unanswered=True),
    ),
    Fault(
        "replica-kill", "a replica killed (kill -9)", _kill(ENGINES[0]), (10.0, 6.0),
        (watch.REPLICA_SILENT, watch.REPLICAS_FEW), Allowed(ENGINE_CODES, cut=True),
    ),
    Fault(
        "worker-kill", "the Celery worker killed in a task", _worker_mid_task, (WORKER_AWAY_S, WORKER_AWAY_S),
        (watch.JOBS_STILL,),
    ),
    Fault(
        "clock-step", "a gateway's clock stepped by 120 s and back by 210 s", _clock_steps, (20.0, 8.0),
        (watch.CLOCK_OFF,), missing=_no_faketime,
    ),
)  # fmt: skip
NAMES = tuple(fault.name for fault in FAULTS)
