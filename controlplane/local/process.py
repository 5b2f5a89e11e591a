"""The units a supervisor runs: how each begins, when it is ready, how it stops.

Layer: service. A unit knows nothing of the others and never restarts itself.
"""

from __future__ import annotations

import http.client
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from controlplane.local.child import Child, spawn
from controlplane.local.errors import from_os_error

PROBE_S = 2.0


class Unit(Protocol):
    """One thing the supervisor keeps alive."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path: ...

    @property
    def ready_within(self) -> float:
        """Seconds from `begin` after which not being ready is a failure."""
        ...

    @property
    def child(self) -> Child | None: ...

    def begin(self) -> None:
        """Start it, from the main thread. Raises LocalError."""

    def is_ready(self) -> bool:
        """One attempt; short."""

    def stop(self, *, grace: float | None = None) -> None:
        """End it and its process group; `grace` 0 kills at once. Harmless when it has ended."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A child of ours. `ready` is one attempt to see that it serves; `stop_signal` asks it to end within `grace`."""

    name: str
    command: Sequence[str | Path]
    environment: Mapping[str, str]
    log: Path
    cwd: Path
    ready: Callable[[], bool]
    ready_within: float = 60.0
    stop_signal: signal.Signals = signal.SIGTERM
    grace: float = 10.0


class ProcessUnit:
    """Runs a `ProcessSpec`."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.child: Child | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def log(self) -> Path:
        return self.spec.log

    @property
    def ready_within(self) -> float:
        return self.spec.ready_within

    def begin(self) -> None:
        try:
            self.child = spawn(
                self.spec.name,
                self.spec.command,
                log=self.spec.log,
                environment=self.spec.environment,
                cwd=self.spec.cwd,
            )
        except OSError as error:
            raise from_os_error(error, f"start {self.spec.name}, log", self.spec.log) from None

    def is_ready(self) -> bool:
        return self.spec.ready()

    def stop(self, *, grace: float | None = None) -> None:
        if self.child is not None:
            self.child.stop(self.spec.stop_signal, self.spec.grace if grace is None else grace)
            self.child = None


class Server(Protocol):
    """What `EmbeddedPostgres` and `EmbeddedValkey` have in common."""

    child: Child | None
    log: Path

    def start(self, timeout: float = ...) -> None: ...

    def stop(self, grace: float = ...) -> None: ...


class ServerUnit:
    """Runs an embedded server, whose `start` returns when it answers."""

    def __init__(self, name: str, server: Server, *, ready_within: float = 60.0) -> None:
        self.name = name
        self.ready_within = ready_within
        self._server = server

    @property
    def log(self) -> Path:
        return self._server.log

    @property
    def child(self) -> Child | None:
        return self._server.child

    def begin(self) -> None:
        self._server.stop(grace=0.0)
        self._server.start(self.ready_within)

    def is_ready(self) -> bool:
        return True

    def stop(self, *, grace: float | None = None) -> None:
        if grace is None:
            self._server.stop()
        else:
            self._server.stop(grace=grace)


def answers_ok(url: str) -> bool:
    """True when GET `url` answers 200: one attempt, bounded in time, connection closed."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_S)
    try:
        connection.request("GET", parts.path, headers={"Connection": "close"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
