"""The deployment that faults are injected into: `tidegate up` with a second gateway and two engines that can be killed.

Layer: service. Real PostgreSQL, Valkey, control plane, worker and gateways in a temporary folder on free ports. Nothing
that ends is started again while the one who injects holds still (`hold`); `turn` lets the supervisor do its work. It
measures nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from controlplane.lab.bench import requests
from controlplane.lab.bench.deployment import OURS, Watching, post
from controlplane.lab.bench.requests import Target
from controlplane.lab.chaos.engine import read_records
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.ports import free_ports
from controlplane.local.process import ProcessSpec, ProcessUnit, Unit, answers_ok
from controlplane.local.stack import TIDEGATE, Options, Ports, Stack, model_names
from controlplane.settings import Secret, Settings
from controlplane.tenants.admin_client import AdminClient
from dataplane.bench.processes import tree
from dataplane.bench.started import Started
from dataplane.protocol import UsageRecord

LEASE_TTL_S = 6.0
LEASE_DEADLINE_MS = 1500
"""Wide: gateways share cores with everything else here, and their own lateness is not what is looked for."""
STALE_S, LOST_S = 2.0, 4.0
READY_S = 60.0
GATEWAYS = ("gateway", "gateway-b")
ENGINES = ("engine-a", "engine-b")
FAKETIME_PLACES = (
    Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"),
    Path("/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1"),
    Path("/usr/lib/faketime/libfaketimeMT.so.1"),
)
LARGE = 10**12
TIGHT_PER_MINUTE, TIGHT_AT_ONCE = 90, 3
LIMITS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "open": (
        {"kind": "requests_per_minute", "hard": LARGE, "away": "open"},
        {"kind": "tokens_per_month", "hard": LARGE, "away": "open"},
        {"kind": "concurrent_requests", "hard": LARGE, "away": "open"},
    ),
    "closed": (
        {"kind": "tokens_per_minute", "hard": LARGE},
        {"kind": "money_per_month", "hard": LARGE},
        {"kind": "concurrent_requests", "hard": LARGE},
    ),
    "tight": (
        {"kind": "requests_per_minute", "hard": TIGHT_PER_MINUTE, "away": "local", "local": 20},
        {"kind": "tokens_per_day", "hard": LARGE, "away": "local", "local": LARGE},
        {"kind": "concurrent_requests", "hard": TIGHT_AT_ONCE, "away": "local", "local": 1},
    ),
}
"""Tenants by what their limits do while Redis is away; the last one's are reached."""
PRICE = {"uncached_input": 2_000_000, "cached_input": 500_000, "output": 8_000_000, "device_second": 1_000}


def faketime() -> Path | None:
    """The library that fakes a process's clock, if it is installed."""
    return next((place for place in FAKETIME_PLACES if place.exists()), None)


class ChaosStack(Stack):
    """The usual stack, and beside it a gateway whose clock can be stepped and two engines."""

    def __init__(self, options: Options, progress: Watching, environment: Mapping[str, str], more: list[int]) -> None:
        super().__init__(options, progress, environment)
        self.gateway_port, *self.engine_ports = more
        self.settings: Settings | None = None
        self.clock = options.home.with_name("clock")

    def records(self, engine: str) -> Path:
        return self.home.path / f"{engine}.jsonl"

    def _units(self, environment: dict[str, str], settings: Settings, pool: str, served: str) -> list[Unit]:
        self.settings = settings
        units = super()._units(environment, settings, pool, served)
        stepped = {**environment, "TIDEGATE_GATEWAY_ID": GATEWAYS[1]}
        library = faketime()
        if library is not None:
            self.clock.write_text("+0\n", encoding="ascii")
            stepped |= {
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        units.append(
            self._unit(GATEWAYS[1], [*TIDEGATE, "serve", "gateway", "--port", str(self.gateway_port)], stepped,
                       self.gateway_port)
        )  # fmt: skip
        for name, port in zip(ENGINES, self.engine_ports, strict=True):
            command = [sys.executable, "-P", "-m", "controlplane.lab.chaos.engine", "--port", str(port)]
            command += ["--replica", name, "--pool", pool, "--model", served, "--records", str(self.records(name))]
            command += ["--control-url", settings.control_url]
            units.append(self._unit(name, command, environment, port))
        return units

    def _unit(self, name: str, command: list[str], environment: Mapping[str, str], port: int) -> ProcessUnit:
        return ProcessUnit(
            ProcessSpec(
                name=name,
                command=command,
                environment=environment,
                log=self.home.log(name),
                cwd=self.home.path,
                ready=lambda: answers_ok(f"http://127.0.0.1:{port}/healthz"),
            )
        )


class Deployment(Started):
    """Use as a context manager: whatever was started is stopped at the end, however it comes."""

    def __init__(self, console: Console) -> None:
        self._display = Watching(console)
        self._folder = tempfile.TemporaryDirectory(prefix="tidegate-chaos-")
        self.home = Path(self._folder.name)
        self.ports = Ports.free()
        options = Options(home=self.home / "home", ports=self.ports, replica=False)
        self.pool, self.model = model_names(options.model)
        self.stack = ChaosStack(options, self._display, environment(os.environ), free_ports(1 + len(ENGINES)))
        self.gateway_ports = dict(zip(GATEWAYS, (self.ports.gateway, self.stack.gateway_port), strict=True))
        self.targets: list[Target] = []
        self.admin: AdminClient
        self.api_token = ""
        self.begun_at = time.time()

    @property
    def settings(self) -> Settings:
        assert self.stack.settings is not None
        return self.stack.settings

    def stop(self) -> None:
        """End all of it; harmless when nothing runs."""
        self.stack.stop()
        self._folder.cleanup()

    def pid(self, unit: str) -> int:
        return self.stack.pids()[unit]

    def kill(self, unit: str) -> None:
        """kill -9 of one process, and nothing else."""
        os.kill(self.pid(unit), signal.SIGKILL)

    def signal_tree(self, unit: str, number: signal.Signals) -> None:
        """Signal a process and all below it, the parent first."""
        parent = self.pid(unit)
        os.kill(parent, number)
        for pid in tree(parent):
            if pid != parent:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)

    def hold(self, seconds: float) -> None:
        """Let time pass in which nothing is started again."""
        time.sleep(seconds)

    def turn(self, seconds: float) -> None:
        """Let the supervisor work for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.stack.turn(left)

    def until(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Let the supervisor work until `condition` holds; False when it did not within `within_s`."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > within_s:
                return False
            self.stack.turn(0.2)
        return True

    def records(self) -> list[UsageRecord]:
        """The engines' own counts."""
        return [record for engine in ENGINES for record in read_records(self.stack.records(engine))]

    def _start(self) -> None:
        self.home.chmod(0o711)  # as root the stores run as another user, who must be able to pass through
        with self._display:
            running = self.stack.start()
        self.api_token = running.admin.api_token
        self.admin = AdminClient(running.console_url, Secret(running.admin.api_token))
        self.admin.call("POST", "/prices", PRICE)
        for tenant, limits in LIMITS.items():
            self.admin.call("POST", "/tenants", {"slug": tenant, "name": tenant.title()})
            for limit in limits:
                self.admin.call("POST", f"/tenants/{tenant}/quotas", limit)
            key = str(self.admin.call("POST", f"/tenants/{tenant}/keys", {"name": "chaos"})["key"])
            for gateway, port in self.gateway_ports.items():
                self.targets.append(Target(gateway, port, key, self.model))
        if not self.until(self._answer, READY_S):
            raise LocalError(f"the gateways did not come to answer within {READY_S:.0f} s", ExitCode.START_FAILED)

    def _answer(self) -> bool:
        return all(post(target, requests.body(target, tokens=1))[0] == 200 for target in self.targets)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """`given` without what would point a deployment elsewhere, with short times so that silence is noticed soon."""
    kept = {name: value for name, value in given.items() if not name.startswith(OURS)}
    return {
        **kept,
        "TIDEGATE_LEASE_TTL_S": str(LEASE_TTL_S),
        "TIDEGATE_LEASE_DEADLINE_MS": str(LEASE_DEADLINE_MS),
        "TIDEGATE_STALE_AFTER_S": str(STALE_S),
        "TIDEGATE_LOST_AFTER_S": str(LOST_S),
    }
