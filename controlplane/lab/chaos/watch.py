"""What the product itself shows of an outage: health, metrics and the admin API, asked twice a second.

Layer: service. The words are this module's; each stands for one figure an alert can be set on (docs/chaos.md). Whoever
does not answer is shown as such, as Prometheus shows `up`.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

EVERY_S = 0.5
TIMEOUT_S = 3.0
STILL_S = 21.0
"""Jobs start every 10 s: counts that have not moved for so long stand still."""
SKEW_S = 5.0

REDIS_AWAY = "redis away"
LIMITS_DECIDE = "limits decide without redis"
POSTGRES_AWAY = "postgres away"
POLICY_UNHEARD = "policy not heard"
GATEWAY_DOWN = "gateway down"
CONTROL_DOWN = "control plane down"
REPLICA_SILENT = "replica silent"
REPLICAS_FEW = "fewer ready replicas"
JOBS_STILL = "jobs stand still"
CLOCK_OFF = "clock off"

_METRIC = re.compile(r"^(tidegate_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


class Watch:
    """Looks until the context ends. `now` are the states of the last look, `take` those since it was last called."""

    def __init__(
        self,
        gateways: Mapping[str, int],
        control: int,
        *,
        metrics_token: str,
        api_token: str,
        replicas: int,
    ) -> None:
        self._gateways = gateways
        self._control = control
        self._metrics = {"authorization": f"Bearer {metrics_token}"}
        self._api = {"authorization": f"Bearer {api_token}"}
        self._replicas = replicas
        self._seen: set[str] = set()
        self.now: frozenset[str] = frozenset()
        self.looks = 0
        self.wrong_at = 0.0
        """When something was last seen to be wrong (monotonic)."""
        self._jobs = -1.0
        self._jobs_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30.0)

    def take(self) -> set[str]:
        """The states seen since the last call."""
        seen, self._seen = self._seen, set()
        return seen

    def gauge(self, name: str) -> dict[str, float]:
        """A gateway metric's value by gateway, of those that answer."""
        found = {}
        for gateway, port in self._gateways.items():
            text = _get(port, "/metrics", self._metrics)
            if text is not None:
                found[gateway] = sum(value for metric, _, value in metrics(text) if metric == name)
        return found

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            states = {state for port in self._gateways.values() for state in self._of_gateway(port)}
            states |= self._of_control()
            self.now = frozenset(states)
            self._seen |= states
            if states:
                self.wrong_at = time.monotonic()
            self.looks += 1

    def _of_gateway(self, port: int) -> set[str]:
        health, text = _get(port, "/healthz", {}), _get(port, "/metrics", self._metrics)
        if health is None or text is None:
            return {GATEWAY_DOWN}
        return _stores(health) | gateway_states(text, self._replicas)

    def _of_control(self) -> set[str]:
        health, text = _get(self._control, "/healthz", {}), _get(self._control, "/metrics", self._metrics)
        if health is None:
            return {CONTROL_DOWN}
        states = _stores(health)
        if text is not None:
            states |= self._of_jobs(text)
        replicas = _get(self._control, "/api/v1/replicas", self._api)
        if replicas is not None:
            states |= replica_states(json.loads(replicas))
        return states

    def _of_jobs(self, text: str) -> set[str]:
        ran = sum(value for metric, _, value in metrics(text) if metric == "tidegate_task_runs_total")
        if ran != self._jobs:
            self._jobs, self._jobs_at = ran, time.monotonic()
        return {JOBS_STILL} if time.monotonic() - self._jobs_at > STILL_S else set()


def metrics(text: str) -> list[tuple[str, str, float]]:
    """Name, labels and value of the product's own metrics in a Prometheus text."""
    return [(name, labels, float(value)) for name, labels, value in _METRIC.findall(text)]


def gateway_states(text: str, replicas: int) -> set[str]:
    """What a gateway's metrics say is wrong."""
    values = {name: value for name, labels, value in metrics(text) if not labels}
    found: Mapping[str, Callable[[], bool]] = {
        LIMITS_DECIDE: lambda: values.get("tidegate_gateway_lease_store_away", 0.0) > 0,
        POLICY_UNHEARD: lambda: values.get("tidegate_gateway_policy_listening", 1.0) < 1,
        REPLICAS_FEW: lambda: values.get("tidegate_gateway_ready_replicas", float(replicas)) < replicas,
        CLOCK_OFF: lambda: abs(values.get("tidegate_gateway_clock_offset_seconds", 0.0)) > SKEW_S,
    }
    return {state for state, holds in found.items() if holds()}


def replica_states(answer: Any) -> set[str]:
    """What the admin API's list of replicas says is wrong."""
    rows = answer["items"] if isinstance(answer, dict) and "items" in answer else answer
    if not isinstance(rows, list):
        return set()
    return {REPLICA_SILENT for row in rows if row.get("state") in {"stale", "lost"}}


def _stores(health: str) -> set[str]:
    told = json.loads(health)
    states = {REDIS_AWAY} if told.get("redis") != "ok" else set()
    return states | ({POSTGRES_AWAY} if told.get("postgres") != "ok" else set())


def _get(port: int, path: str, headers: Mapping[str, str]) -> str | None:
    """The body of a 200, None for anything else."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"connection": "close", **headers})
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if response.status == 200 else None
