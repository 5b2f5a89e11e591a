"""One side's server as a process: started on its cores, known to be ready and to be idle, stopped with all it started.

Layer: service. It knows no peer by name and measures nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.bench.engine.client import Endpoint
from dataplane.bench.errors import NotToBeHadError, SideError
from dataplane.bench.processes import cpu_seconds
from dataplane.bench.started import Started

SCRIPT = Path(__file__).with_name("launch.py")
READY_S = 900.0
"""A peer may compile its kernels when it starts."""
LOOK_S = 0.25
STOP_S = 10.0
IDLE_SHARE = 0.1
"""Of one core: more than this is no idling."""
SETTLE_S = 30.0
NOT_PASSED = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started. `setup` says what is on or off in it, with its dtypes under `dtype`."""

    endpoint: Endpoint
    command: tuple[str, ...]
    version: str
    setup: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    """A path that answers 200 once the model is loaded."""


class Server(Started):
    """Use as a context manager: entering waits until it is ready. Raises NotToBeHadError when it does not come to
    answer. `cores` are those it may run on; its output goes to `log`."""

    def __init__(self, launch: Launch, *, cores: Collection[int], log: Path) -> None:
        self.launch = launch
        self._cores = ",".join(str(core) for core in sorted(cores))
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.launch.endpoint.name

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time that it and its children have taken."""
        return cpu_seconds(self.pid)

    def check(self, within: float = 0.0) -> None:
        """Raises SideError when it has ended, or ends within so many seconds."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(within)
            raise SideError(f"{self.name} ended with {status} while it was measured: {self.said()}")

    def settle(self) -> None:
        """Wait until it has nothing left to do. Raises SideError when it does not come to rest."""
        begun = time.monotonic()
        while time.monotonic() - begun < SETTLE_S:
            before = self.cpu_seconds()
            self.check(LOOK_S)
            if self.cpu_seconds() - before <= IDLE_SHARE * LOOK_S:
                return
        raise SideError(f"{self.name} computes although it was asked for nothing")

    def said(self) -> str:
        """The last line of its output that says something."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def stop(self) -> None:
        """End it and every process it started."""
        process, self._process = self._process, None
        if process is None:
            return
        self._signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        self._signal(process, signal.SIGKILL)
        process.wait()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - fixed argument list, no shell
                [sys.executable, "-I", "-S", str(SCRIPT), str(os.getpid()), self._cores, *self.launch.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, **self.launch.environment},
                cwd=self._log.parent,
                start_new_session=True,
            )
        begun = time.monotonic()
        while not self._healthy():
            if time.monotonic() - begun > READY_S:
                raise NotToBeHadError(f"{self.name} was not ready within {READY_S:.0f} s: {self.said()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)
                raise NotToBeHadError(f"{self.name} ended when it was started: {self.said()}")

    def _healthy(self) -> bool:
        endpoint = self.launch.endpoint
        request = urllib.request.Request(f"{endpoint.url}{self.launch.health}")  # noqa: S310 - an address of our own
        request.add_header("Authorization", f"Bearer {endpoint.token}")
        try:
            with urllib.request.urlopen(request, timeout=5.0) as response:  # noqa: S310
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Reach the whole group, also after the process itself has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
