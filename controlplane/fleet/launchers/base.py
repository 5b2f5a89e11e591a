"""What every launcher is: four calls.

Layer: service. A launcher starts and ends replicas; it never decides how many there are (the reconciler does).
Every action carries the caller's epoch: one lower than the epoch already seen for that replica is refused, so a
delayed action of a replaced reconciler does nothing. Repeating an action with its idempotency key is harmless.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica to run. `model` is a path or a built-in name; `arguments` go to the engine as they are."""

    replica: str
    pool: str
    model: str
    served_model: str
    host: str
    port: int
    control_url: str
    arguments: tuple[str, ...] = ()


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as its launcher knows it; `handle` names it there (a process id, a pod).

    `status` is set once it ended.
    """

    spec: ReplicaSpec
    epoch: int
    idempotency_key: str
    handle: str
    url: str
    running: bool
    status: str = ""


class LauncherError(Exception):
    """The replica could not be started, stopped or adopted; one sentence."""


class StaleEpochError(LauncherError):
    """The action's epoch is older than one already acted upon."""


class Launcher(Protocol):
    async def start(self, spec: ReplicaSpec, *, epoch: int, idempotency_key: str) -> Launched:
        """Start `spec`. A repeat with the same key returns what the first call started."""
        ...

    async def stop(self, replica: str, *, epoch: int) -> None:
        """Ask `replica` to drain and end, then end it. One that is unknown or gone is no error."""
        ...

    async def list(self) -> list[Launched]:
        """Every replica this launcher has a record of, running or ended."""
        ...

    async def adopt(self, replica: str, *, epoch: int) -> Launched:
        """Take over a running replica that an earlier launcher started. Raises LauncherError when it does not run."""
        ...
