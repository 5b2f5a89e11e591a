"""The replica as a unit: the process launcher starts it, each start with its own epoch.

Layer: service.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from controlplane.fleet.launchers.base import LauncherError, ReplicaSpec
from controlplane.fleet.launchers.process import GRACE_S, ProcessLauncher
from controlplane.local.child import Child
from controlplane.local.errors import LocalError
from controlplane.local.process import answers_ok


class ReplicaUnit:
    """READY means that the replica says so: its model is loaded and its core takes requests."""

    ready_within = 180.0

    def __init__(self, name: str, launcher: ProcessLauncher, spec: ReplicaSpec) -> None:
        self.name = name
        self._launcher = launcher
        self._spec = spec

    @property
    def log(self) -> Path:
        return self._launcher.log(self._spec.replica)

    @property
    def child(self) -> Child | None:
        return self._launcher.child(self._spec.replica)

    def begin(self) -> None:
        epoch = self._launcher.epoch(self._spec.replica) + 1
        key = f"{self._spec.replica}-{epoch}"
        try:
            asyncio.run(self._launcher.start(self._spec, epoch=epoch, idempotency_key=key))
        except LauncherError as error:
            raise LocalError(str(error)) from None

    def is_ready(self) -> bool:
        return answers_ok(f"http://{self._spec.host}:{self._spec.port}/healthz")

    def stop(self, *, grace: float | None = None) -> None:
        replica = self._spec.replica
        if self._launcher.child(replica) is not None:
            epoch = self._launcher.epoch(replica)
            self._launcher.stop_now(replica, epoch=epoch, grace=GRACE_S if grace is None else grace)
