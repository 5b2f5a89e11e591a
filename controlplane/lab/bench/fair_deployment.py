"""The deployment under the fairness bench: four gateways, and replicas with a service time.

Layer: service. Real PostgreSQL, Valkey, control plane and gateways, as `tidegate up` starts them, in a temporary
folder; a fifth gateway knows no lane for long prompts and is the control. It measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from controlplane.lab.bench.batching_engine import HOST, Speed
from controlplane.lab.bench.deployment import OURS, READY_S, Watching
from controlplane.local.child import Child, spawn
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.ports import free_ports
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.local.process import answers_ok
from controlplane.local.stack import TIDEGATE, Options, Ports, Stack, model_names
from controlplane.local.valkey import EmbeddedValkey
from controlplane.settings import Secret
from controlplane.tenants.admin_client import AdminClient
from dataplane.bench.started import Started

GATEWAYS = 4
REPLICAS = 4
CONTEXT = 32_768
NO_LONG_PROMPT = 2**31
UNBOUNDED = 1_000_000
"""Slots of a replica that holds whatever comes: all goes on at once and waits in the engine, by arrival."""
KV_TOKENS = 65_536


class FairDeployment(Started):
    """Use as a context manager. `gateways` are the four, `control` the fifth, as base URLs."""

    def __init__(self, console: Console, speed: Speed) -> None:
        self._display = Watching(console)
        self._speed = speed
        self._folder = tempfile.TemporaryDirectory(prefix="tidegate-bench-")
        self._children: list[Child] = []
        self._ports = Ports.free()
        self._more = free_ports(GATEWAYS + REPLICAS)
        home = Path(self._folder.name)
        self.pool, self.model = model_names(Options(home=home).model)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        self._given = {**kept, "TIDEGATE_ASSUMED_CONTEXT": str(CONTEXT), "TIDEGATE_QUEUE_TENANT": "200"}
        self._stack = Stack(Options(home=home / "home", ports=self._ports, replica=False), self._display, self._given)
        own = [self._ports.gateway, *self._more[: GATEWAYS - 1]]
        self.gateways = [f"http://{HOST}:{port}" for port in own]
        self.control = f"http://{HOST}:{self._more[GATEWAYS - 1]}"
        self._admin: AdminClient | None = None

    def tenant(self, slug: str, weight: float, floor: float = 0.0) -> str:
        """A new tenant's key."""
        body: dict[str, Any] = {"slug": slug, "name": slug, "weight": weight, "floor_tokens_per_s": floor}
        self._call("POST", "/tenants", body)
        return str(self._call("POST", f"/tenants/{slug}/keys", {"name": "bench"})["key"])

    def hold(self, slots: int) -> None:
        """Say what each replica holds, and wait until the gateways know."""
        self._call("PATCH", f"/pools/{self.pool}", {"replica_slots": slots, "replica_tokens": KV_TOKENS * slots})

    async def check(self) -> None:
        """Raises LocalError when a process has ended: what was measured would be worthless."""
        await asyncio.to_thread(self._stack.turn, 0.0)
        ended = [child.name for child in self._children if child.returncode is not None]
        if self._display.ended_units or ended:
            raise LocalError(f"{', '.join([*self._display.ended_units, *ended])} ended while it was measured")

    def _call(self, method: str, path: str, body: dict[str, Any]) -> Any:
        assert self._admin is not None, "the deployment is not started"
        return self._admin.call(method, path, body)

    def _start(self) -> None:
        Path(self._folder.name).chmod(0o711)  # as root the stores run as another user
        with self._display:
            running = self._stack.start()
        self._admin = AdminClient(running.console_url, Secret(running.admin.api_token))
        self.hold(self._speed.slots)
        home, ports = self._stack.home, self._ports
        environment = {
            **self._given,
            "DATABASE_URL": EmbeddedPostgres(home.postgres, ports.postgres).url,
            "REDIS_URL": EmbeddedValkey(home.valkey, ports.valkey).url,
            "TIDEGATE_HOME": str(home.path),
            "TIDEGATE_CONTROL_URL": f"http://{HOST}:{ports.control}",
            "TIDEGATE_INTERNAL_TOKEN": home.secret("internal").reveal(),
            "TIDEGATE_SESSION_SECRET": home.secret("session").reveal(),
        }
        for number, port in enumerate(self._more[:GATEWAYS], 1):
            own = {**environment, "TIDEGATE_GATEWAY_ID": f"gateway-{number}"}
            if number == GATEWAYS:
                own["TIDEGATE_LONG_PROMPT"] = str(NO_LONG_PROMPT)
            self._spawn(f"gateway-{number}", [*TIDEGATE, "serve", "gateway", "--host", HOST, "--port", str(port)], own)
        speed, engines = self._speed, self._more[GATEWAYS:]
        command = [sys.executable, "-P", "-m", "controlplane.lab.bench.batching_engine", "--model", self.model]
        command += ["--pool", self.pool, "--control-url", environment["TIDEGATE_CONTROL_URL"]]
        command += ["--step-ms", str(speed.step_s * 1000), "--token-us", str(speed.token_s * 1e6)]
        command += ["--budget", str(speed.budget), "--slots", str(speed.slots)]
        for port in engines:
            command += ["--port", str(port)]
        self._spawn("engines", command, environment)
        for url in [*self.gateways, self.control, *(f"http://{HOST}:{port}" for port in engines)]:
            self._until_ok(f"{url}/healthz")

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        home = self._stack.home
        self._children.append(spawn(name, command, log=home.log(name), environment=environment, cwd=home.path))

    def _until_ok(self, url: str) -> None:
        begun = time.monotonic()
        while not answers_ok(url):
            if time.monotonic() - begun > READY_S:
                raise LocalError(f"{url} did not answer within {READY_S:.0f} s", ExitCode.START_FAILED)
            self._stack.turn(0.1)

    def stop(self) -> None:
        for child in self._children:
            with contextlib.suppress(OSError):
                child.stop(signal.SIGTERM, 3.0)
        self._children = []
        self._stack.stop()
        self._folder.cleanup()
