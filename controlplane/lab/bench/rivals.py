"""Other gateways in front of the same fake engine, in throw-away environments.

Layer: service. Installs from PyPI and npm, writes each one's configuration, starts it. Whatever cannot be had is said
and left out; it measures nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from controlplane.lab.bench.deployment import Deployment, post
from controlplane.lab.bench.requests import Target, body
from controlplane.local.child import Child, spawn
from controlplane.local.logs import last_line
from controlplane.local.ports import free_ports
from dataplane.bench.environment import Environments, run, version_of
from dataplane.bench.errors import NotToBeHadError
from dataplane.bench.processes import pin
from dataplane.bench.started import Started

READY_S = 180.0
PRISMA_S = 120.0
KEY = "sk-bench-0123456789"
LITELLM = "litellm[proxy]"
PORTKEY = "@portkey-ai/gateway"


@dataclass(frozen=True, slots=True)
class Plan:
    """How one rival is started on a port: `command` after `environment`, and what is on or off in it (`setup`)."""

    name: str
    setup: str
    version: str
    port: int
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()

    def target(self, model: str) -> Target:
        return Target(self.name, self.port, KEY, model, self.headers)


def litellm(deployment: Deployment, folder: Path, tell: Callable[[str], None]) -> list[Plan]:
    """LiteLLM's proxy, as it starts by default and on granian. Raises NotToBeHadError."""
    python = Environments(folder, tell).python("litellm", (LITELLM, "prisma"))
    environment = python.parents[1]
    database = _prisma(environment)
    config = folder / "litellm.json"  # YAML takes JSON
    config.write_bytes(msgspec.json.encode(_litellm_config(deployment)))
    version = version_of(python, "litellm")
    setup = f"master key, Redis and a provider budget on, database {database}"
    variables = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    plans = []
    for name, extra in (("litellm", ()), ("litellm --run_granian", ("--run_granian",))):
        port = free_ports(1)[0]
        command = [str(environment / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--num_workers", "1", *extra]
        plans.append(Plan(name, setup, version, port, tuple(command), variables))
    return plans


def portkey(deployment: Deployment, folder: Path, tell: Callable[[str], None]) -> list[Plan]:
    """Portkey's gateway from npm, which keeps no keys and counts nothing. Raises NotToBeHadError."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise NotToBeHadError("Portkey's gateway needs node and npm, which are not installed")
    home = folder / "portkey" / "node_modules" / PORTKEY
    if not home.exists():
        tell("installing Portkey's gateway from npm")
        (folder / "portkey").mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix", str(folder / "portkey")]
        run([*install, PORTKEY], "install Portkey's gateway")
    version = str(msgspec.json.decode((home / "package.json").read_bytes())["version"])
    port = free_ports(1)[0]
    engine = f"http://127.0.0.1:{deployment.engine_port}/v1"
    headers = (("x-portkey-provider", "openai"), ("x-portkey-custom-host", engine))
    command = (node, str(home / "build" / "start-server.js"), f"--port={port}", "--headless")
    variables = {"TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost", "NODE_ENV": "production"}
    return [Plan("portkey", "no keys, no budgets, no store", version, port, command, variables, headers)]


SOURCES: tuple[tuple[str, Callable[[Deployment, Path, Callable[[str], None]], list[Plan]]], ...] = (
    ("litellm", litellm),
    ("portkey", portkey),
)


class Rival(Started):
    """A rival that runs on the gateway's core. Use as a context manager. Raises NotToBeHadError when it does not come
    to answer."""

    def __init__(self, plan: Plan, deployment: Deployment) -> None:
        self.plan = plan
        self._deployment = deployment
        self._child: Child | None = None
        self.target = plan.target(deployment.model)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop(signal.SIGTERM, 5.0)
            self._child = None

    def _start(self) -> None:
        deployment, plan = self._deployment, self.plan
        log = deployment.home / f"{plan.name.partition(' ')[0]}-{plan.port}.log"
        environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "DATABASE_URL"}}
        self._child = spawn(
            plan.name, plan.command, log=log, environment={**environment, **plan.environment}, cwd=deployment.home
        )
        pin(self._child.pid, {deployment.cores.gateway})
        begun, status, said = time.monotonic(), 0, ""
        content = body(self.target, tokens=1)
        while status != 200:
            if self._child.returncode is not None:
                raise NotToBeHadError(f"{plan.name} ended: {last_line(log)}")
            if time.monotonic() - begun > READY_S:
                raise NotToBeHadError(f"{plan.name} did not answer within {READY_S:.0f} s: {said[:200]}")
            deployment.wait(0.25)
            status, said = post(self.target, content)


def _litellm_config(deployment: Deployment) -> dict[str, object]:
    redis = urlsplit(deployment.redis_url)
    engine = {
        "model": f"openai/{deployment.model}",
        "api_base": f"http://127.0.0.1:{deployment.engine_port}/v1",
        "api_key": "none",
    }
    return {
        "model_list": [{"model_name": deployment.model, "litellm_params": engine}],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"telemetry": False, "set_verbose": False, "request_timeout": 60},
        "router_settings": {
            "redis_host": redis.hostname,
            "redis_port": redis.port,
            "redis_password": redis.password,
            "provider_budget_config": {"openai": {"budget_limit": 1_000_000.0, "time_period": "1d"}},
        },
    }


def _prisma(environment: Path) -> str:
    """Whether LiteLLM's database layer can be had: its engine is no package of a registry but a download of its own."""
    binaries = environment / "bin"
    schema = next(environment.glob("lib/python*/site-packages/litellm/proxy/schema.prisma"), None)
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
    if schema is None or not (binaries / "prisma").exists():
        return "off (its prisma client does not install)"
    generate = [str(binaries / "prisma"), "generate", "--schema", str(schema)]
    try:
        run(generate, "generate LiteLLM's database layer", environment={"PATH": path}, within_s=PRISMA_S)
    except NotToBeHadError:
        return "off (its prisma engine cannot be fetched)"
    return "off (not configured)"
