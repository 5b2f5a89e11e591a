"""Replicas as processes of this machine.

Layer: service. Call it from the main thread of the process that is to be the replicas' parent: they end with it.
What it started is recorded under `replicas/<id>/launch.json`, so that a successor can list and adopt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from controlplane.fleet.launchers.base import Launched, LauncherError, ReplicaSpec, StaleEpochError
from controlplane.local.child import Child, spawn, wait_readable
from controlplane.local.files import make_folder, write_private

GRACE_S = 10.0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`started_ticks` is the process's start time from /proc: a pid alone may be somebody else's by now."""

    launched: Launched
    pid: int
    started_ticks: int


class ProcessLauncher:
    """`environment` is what every replica gets, the internal token among it."""

    def __init__(self, home: Path, environment: Mapping[str, str], logs: Path) -> None:
        self._home = home
        self._environment = dict(environment)
        self._logs = logs
        self._children: dict[str, Child] = {}

    def child(self, replica: str) -> Child | None:
        """The process started here, for its supervisor to wait on."""
        return self._children.get(replica)

    def log(self, replica: str) -> Path:
        return self._logs / f"{replica}.log"

    def epoch(self, replica: str) -> int:
        """The newest epoch acted upon for `replica`, 0 before the first."""
        known = self._read(replica)
        return 0 if known is None else known.launched.epoch

    async def start(self, spec: ReplicaSpec, *, epoch: int, idempotency_key: str) -> Launched:
        known = self._read(spec.replica)
        if known is not None:
            self._require_current(known, epoch)
            if _runs(known):
                if known.launched.idempotency_key == idempotency_key:
                    return known.launched
                raise LauncherError(f"replica {spec.replica} runs already as process {known.pid}; stop it first")
        make_folder(self._folder(spec.replica))
        try:
            child = spawn(
                spec.replica,
                command(spec, self._home),
                log=self.log(spec.replica),
                environment=self._environment,
                cwd=self._home,
            )
        except OSError as error:
            raise LauncherError(f"cannot start replica {spec.replica}: {error.strerror or error}") from None
        previous = self._children.pop(spec.replica, None)
        if previous is not None:
            previous.close()
        self._children[spec.replica] = child
        launched = Launched(
            spec=spec,
            epoch=epoch,
            idempotency_key=idempotency_key,
            handle=str(child.pid),
            url=f"http://{spec.host}:{spec.port}",
            running=True,
        )
        self._write(Record(launched=launched, pid=child.pid, started_ticks=_started_ticks(child.pid) or 0))
        return launched

    async def stop(self, replica: str, *, epoch: int) -> None:
        await asyncio.to_thread(self.stop_now, replica, epoch=epoch, grace=GRACE_S)

    def stop_now(self, replica: str, *, epoch: int, grace: float) -> None:
        """`stop`, in the calling thread."""
        known = self._read(replica)
        if known is None:
            return
        self._require_current(known, epoch)
        child = self._children.pop(replica, None)
        if child is not None:
            status = child.stop(signal.SIGTERM, grace)
        else:
            _end(known, grace)
            status = 0
        ended = msgspec.structs.replace(known.launched, epoch=epoch, running=False, status=f"ended with {status}")
        self._write(msgspec.structs.replace(known, launched=ended))

    async def list(self) -> list[Launched]:
        found = []
        for path in sorted(self._home.glob("replicas/*/launch.json")):
            known = self._read(path.parent.name)
            if known is not None:
                found.append(msgspec.structs.replace(known.launched, running=_runs(known)))
        return found

    async def adopt(self, replica: str, *, epoch: int) -> Launched:
        known = self._read(replica)
        if known is None or not _runs(known):
            raise LauncherError(f"replica {replica} does not run on this machine")
        self._require_current(known, epoch)
        adopted = msgspec.structs.replace(known.launched, epoch=epoch, running=True)
        self._write(msgspec.structs.replace(known, launched=adopted))
        return adopted

    # -- records -------------------------------------------------------------------------------------------

    def _folder(self, replica: str) -> Path:
        return self._home / "replicas" / replica

    def _read(self, replica: str) -> Record | None:
        try:
            return msgspec.json.decode((self._folder(replica) / "launch.json").read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _write(self, record: Record) -> None:
        path = self._folder(record.launched.spec.replica) / "launch.json"
        write_private(path, msgspec.json.encode(record).decode() + "\n")

    @staticmethod
    def _require_current(known: Record, epoch: int) -> None:
        if epoch < known.launched.epoch:
            replica = known.launched.spec.replica
            raise StaleEpochError(f"epoch {epoch} is older than {known.launched.epoch}, already in force for {replica}")


def command(spec: ReplicaSpec, home: Path) -> list[str | Path]:
    """The engine's command line for `spec`."""
    return [
        *(sys.executable, "-P", "-m", "controlplane", "engine", "serve"),
        *("--replica", spec.replica),
        *("--pool", spec.pool),
        *("--model", spec.model),
        *("--served-model", spec.served_model),
        *("--host", spec.host),
        *("--port", str(spec.port)),
        *("--control-url", spec.control_url),
        *("--home", home),
        *spec.arguments,
    ]


def _started_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the process's start, None when there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] == "Z" else int(fields[19])


def _runs(record: Record) -> bool:
    return _started_ticks(record.pid) == record.started_ticks


def _end(record: Record, grace: float) -> None:
    """End a replica that is no child of ours, with its group."""
    if not _runs(record):
        return
    with contextlib.suppress(OSError), os.fdopen(os.pidfd_open(record.pid), "rb") as pidfd:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGTERM)
        wait_readable(pidfd.fileno(), grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(record.pid, signal.SIGKILL)
