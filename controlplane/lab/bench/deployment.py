"""The deployment under the bench: what `tidegate up` starts, with a fake engine as its one replica.

Layer: service. Real PostgreSQL, Valkey, control plane, worker and gateway in a temporary folder on free ports, a tenant
and a key made through the admin API. The gateway has a core of its own, which only the plain relay shares, the bench's
control, while nothing goes to the gateway; everything else shares the others. It measures nothing.
"""

from __future__ import annotations

import dataclasses
import http.client
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from controlplane.lab.bench import plain_relay, requests
from controlplane.lab.bench.cores import Cores, choose_cores
from controlplane.lab.bench.requests import Target
from controlplane.local.child import Child, spawn
from controlplane.local.display import Display
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.logs import last_line
from controlplane.local.ports import free_ports
from controlplane.local.process import answers_ok
from controlplane.local.stack import Options, Ports, Running, Stack, model_names
from controlplane.local.valkey import EmbeddedValkey
from controlplane.quotas.schemas import QuotaKind
from controlplane.settings import Secret
from controlplane.tenants.admin_client import AdminClient
from dataplane.bench.processes import pin
from dataplane.bench.started import Started

TENANT = "bench"
LEASE_DEADLINE_MS = 2000
"""With two cores Valkey shares one with a load that takes all of it: its answers are late then, not away."""
NO_GATEWAY = "http://127.0.0.1:9"
"""Where canaries look for a gateway: their requests are not to be measured."""
MAX_IN_FLIGHT = 128
"""Bound of requests in flight at the gateway: above every concurrency measured, small enough to be filled."""
LIMITED = (
    QuotaKind.REQUESTS_PER_MINUTE,
    QuotaKind.TOKENS_PER_MINUTE,
    QuotaKind.CONCURRENT_REQUESTS,
    QuotaKind.TOKENS_PER_MONTH,
)
"""Limits that every request takes a lease on: one of each counter, and two of a minute."""
UNREACHED = 10**12
READY_S = 30.0
FAKE_ENGINE = "fake engine"
OURS = ("TIDEGATE_", "DATABASE_URL", "REDIS_URL")


class Watching(Display):
    """Also remembers what ended unexpectedly."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, console)
        self.ended_units: list[str] = []

    def ended(self, name: str, how: str, restart_in: float) -> None:
        self.ended_units.append(f"{name} {how}")
        super().ended(name, how, restart_in)


class Deployment(Started):
    """Use as a context manager: whatever was started is stopped at the end, however it comes. `console` shows progress.

    The calling process moves to the load's core, and back at the end.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display = Watching(console)
        self._folder = tempfile.TemporaryDirectory(prefix="tidegate-bench-")
        self._engine: Child | None = None
        self._relay: Child | None = None
        self._before = os.sched_getaffinity(0)
        self.cores: Cores = choose_cores(self._before)
        self.home = Path(self._folder.name)
        self.ports = Ports.free()
        self.engine_port, relay_port = free_ports(2)
        self.pool, self.model = model_names(Options(home=self.home).model)
        self._stack = Stack(
            Options(home=self.home / "home", ports=self.ports, replica=False), self._display, environment(os.environ)
        )
        self.direct = Target("engine", self.engine_port, "none", self.model)
        self.gateway = Target("gateway", self.ports.gateway, "", self.model)
        self.plain = Target(plain_relay.NAME, relay_port, "none", self.model)

    @property
    def gateway_pid(self) -> int:
        return self._stack.pids()["gateway"]

    @property
    def plain_pid(self) -> int:
        assert self._relay is not None
        return self._relay.pid

    @property
    def redis_url(self) -> str:
        """Where the deployment's Valkey answers, its password included."""
        return EmbeddedValkey(self._stack.home.valkey, self.ports.valkey).url

    def wait(self, seconds: float) -> None:
        """See to the supervised processes for a while. Raises LocalError as `check` does."""
        self._stack.turn(seconds)
        self.check()

    def check(self) -> None:
        """See to the supervised processes. Raises LocalError when one has ended: its figures would be worthless."""
        self._stack.turn(0.0)
        if self._display.ended_units:
            raise LocalError(f"{'; '.join(self._display.ended_units)} while it was measured")
        for child in (self._engine, self._relay):
            if child is not None and child.returncode is not None:
                said = last_line(self._stack.home.log(child.name))
                raise LocalError(f"the {child.name} ended while it was measured: {said}")

    def stop(self) -> None:
        """End all of it; harmless when nothing runs."""
        for child in (self._relay, self._engine):
            if child is not None:
                child.stop(signal.SIGTERM, 2.0)
        self._relay = self._engine = None
        self._stack.stop()
        os.sched_setaffinity(0, self._before)
        self._folder.cleanup()

    def _start(self) -> None:
        # As root the stores run as another user, who must be able to pass through.
        self.home.chmod(0o711)
        os.sched_setaffinity(0, {self.cores.load})
        with self._display:
            running = self._stack.start()
        for name, pid in self._stack.pids().items():
            pin(pid, {self.cores.gateway} if name == "gateway" else self.cores.rest)
        self.gateway = dataclasses.replace(self.gateway, key=self._key(running))
        self._start_engine()
        self._start_relay()
        self._wait_for_route()

    def _key(self, running: Running) -> str:
        """A new tenant's key and limits, made as an operator makes them."""
        admin = AdminClient(running.console_url, Secret(running.admin.api_token))
        admin.call("POST", "/tenants", {"slug": TENANT, "name": "Bench"})
        for kind in LIMITED:
            admin.call("POST", f"/tenants/{TENANT}/quotas", {"kind": kind.value, "hard": UNREACHED})
        created = admin.call("POST", f"/tenants/{TENANT}/keys", {"name": "bench"})
        return str(created["key"])

    def _start_engine(self) -> None:
        token = self._stack.home.secret("internal").reveal()
        command = [sys.executable, "-P", "-m", "controlplane.lab.bench.engine", "--port", str(self.engine_port)]
        command += ["--model", self.model, "--pool", self.pool]
        command += ["--control-url", f"http://127.0.0.1:{self.ports.control}"]
        self._engine = spawn(
            FAKE_ENGINE,
            command,
            log=self._stack.home.log(FAKE_ENGINE),
            environment={**os.environ, "TIDEGATE_INTERNAL_TOKEN": token},
            cwd=self.home,
        )
        pin(self._engine.pid, {self.cores.load})
        self._until(lambda: answers_ok(f"http://127.0.0.1:{self.engine_port}/healthz"), "the fake engine did not start")

    def _start_relay(self) -> None:
        log = self._stack.home.log(plain_relay.NAME)
        self._relay = plain_relay.start(self.plain.port, self.engine_port, log=log, cwd=self.home)
        pin(self._relay.pid, {self.cores.gateway})
        content = requests.body(self.plain, tokens=1)
        self._until(lambda: post(self.plain, content)[0] == 200, "the plain relay did not come to answer")

    def _wait_for_route(self) -> None:
        """Until the gateway has heard of the engine and answers with it."""
        content = requests.body(self.gateway, tokens=1)
        seen = ""

        def answered() -> bool:
            nonlocal seen
            status, seen = post(self.gateway, content)
            return status == 200

        self._until(answered, "the gateway did not come to answer")
        self._console.print(
            f"gateway on core {self.cores.gateway}, load and fake engine on core {self.cores.load}", style="dim"
        )

    def _until(self, condition: object, otherwise: str) -> None:
        assert callable(condition)
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > READY_S:
                raise LocalError(f"{otherwise} within {READY_S:.0f} s", ExitCode.START_FAILED)
            self.wait(0.1)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """`given` without what would point a deployment elsewhere, with the bench's own bounds."""
    kept = {name: value for name, value in given.items() if not name.startswith(OURS)}
    return {
        **kept,
        "TIDEGATE_MAX_IN_FLIGHT": str(MAX_IN_FLIGHT),
        "TIDEGATE_LEASE_DEADLINE_MS": str(LEASE_DEADLINE_MS),
        "TIDEGATE_CANARY_GATEWAYS": NO_GATEWAY,
    }


def post(target: Target, content: bytes) -> tuple[int, str]:
    """Status and the beginning of the answer; 0 and the reason when there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=5.0)
    try:
        connection.request("POST", target.path, body=content, headers=requests.headers(target))
        response = connection.getresponse()
        return response.status, response.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()
