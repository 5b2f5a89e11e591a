"""Everything `tidegate up` runs: which processes, with which environment, in which order.

Layer: service. It composes; `supervisor` keeps alive, `display` shows, `cli` parses.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from controlplane import egress, migrate
from controlplane.fleet.launchers.base import ReplicaSpec
from controlplane.fleet.launchers.process import ProcessLauncher
from controlplane.local import external, ports
from controlplane.local.bootstrap import Admin, Demo, bootstrap, require_undamaged
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.home import Endpoints, Home
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.local.process import ProcessSpec, ProcessUnit, ServerUnit, Unit, answers_ok
from controlplane.local.replica import ReplicaUnit
from controlplane.local.route_probe import RouteProbe
from controlplane.local.supervisor import PROBE_EVERY_S, Observer, Supervisor
from controlplane.local.valkey import EmbeddedValkey
from controlplane.local.worker_probe import WorkerProbe
from controlplane.settings import SHORTEST_SECRET, Secret, Settings, SettingsError

DEMO_MODEL = "smollm2"
DEMO_SERVED = "smollm2-135m-instruct"
GATEWAY_ID = "gateway-0"
STOP_ORDER = ("gateway", "replica", "worker", "control", "valkey", "postgres")
"""Requests end first, then those who report about them, then those who store it."""
STOP_EARLY = ("worker",)
"""Serves no request and takes its seconds to end, so it ends beside those that do."""
ROUTED_WITHIN_S = 30.0
TIDEGATE = (sys.executable, "-P", "-m", "controlplane")


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything listens; never 0."""

    control: int = 7300
    gateway: int = 7301
    replica: int = 7310
    postgres: int = 7332
    valkey: int = 7379

    @classmethod
    def free(cls) -> Ports:
        return cls(**dict(zip(cls.__struct_fields__, ports.free_ports(len(cls.__struct_fields__)), strict=True)))


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of `tidegate up` say."""

    home: Path
    host: str = ports.LOOPBACK
    ports: Ports = Ports()
    model: str = DEMO_MODEL
    replica: bool = True
    engine_arguments: tuple[str, ...] = ()


class Progress(Observer, Protocol):
    """An observer that also shows the steps that are no process."""

    def step(self, name: str) -> None: ...

    def done(self, name: str, detail: str) -> None: ...


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What a started stack offers."""

    console_url: str
    gateway_url: str
    model: str
    admin: Admin
    demo: Demo


class Stack:
    """`start`, then `run` until interrupted, then `stop`, whatever happened before."""

    def __init__(self, options: Options, progress: Progress, environment: Mapping[str, str] | None = None) -> None:
        self.options = options
        self.home = Home(options.home)
        self._progress = progress
        self._given = _set(os.environ if environment is None else environment)
        self._supervisor: Supervisor | None = None
        self._opened = False

    def start(self) -> Running:
        """Start everything and wait until it serves. Raises LocalError; `stop` is due even then."""
        options = self.options
        pool, served = model_names(options.model)
        ports.require_address(options.host)
        self._require_variables()
        listeners = self._listeners()
        ports.require_distinct(listeners)
        self.home.open()
        self._opened = True
        for listener in listeners:
            ports.require_free(listener)
        require_undamaged(self.home)
        self._supervisor = Supervisor(self._progress)
        database_url, redis_url = self._stores()
        settings, environment = self._settings(database_url, redis_url)
        self._migrate(database_url)
        self._progress.step("bootstrap")
        admin, demo = asyncio.run(bootstrap(self.home, settings, pool, served))
        self._progress.done("bootstrap", f"operator {admin.email}, tenant {demo.tenant}")
        self._supervisor.launch(self._units(environment, settings, pool, served))
        if options.replica:
            self._wait_for_route(settings, admin)
        running = Running(
            console_url=_url(options.host, options.ports.control),
            gateway_url=settings.public_gateway_url,
            model=served,
            admin=admin,
            demo=demo,
        )
        self.home.publish(
            Endpoints(
                pid=os.getpid(),
                started_at=time.time(),
                control_url=settings.control_url,
                gateway_url=_url(options.host, options.ports.gateway),
                replica_urls=[_url(ports.LOOPBACK, options.ports.replica)] if options.replica else [],
            )
        )
        return running

    def run(self) -> None:
        """Supervise until KeyboardInterrupt."""
        assert self._supervisor is not None
        self._supervisor.run()

    def turn(self, longest: float) -> None:
        """Supervise for one event, at most `longest` seconds."""
        assert self._supervisor is not None
        self._supervisor.turn(longest)

    def pids(self) -> dict[str, int]:
        return self._supervisor.pids() if self._supervisor is not None else {}

    def stop(self, interruptible: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Stop in order; False when it had to be cut short by a KeyboardInterrupt within an `interruptible`."""
        orderly = True
        if self._supervisor is not None:
            orderly = self._supervisor.stop(STOP_ORDER, early=STOP_EARLY, interruptible=interruptible)
        self._supervisor = None
        if self._opened:
            self.home.close()
            self._opened = False
        return orderly

    # -- steps ---------------------------------------------------------------------------------------------

    def _require_variables(self) -> None:
        """Everything the user set, looked at before anything is made; what they left out is stood in for."""
        stand_ins = {
            "DATABASE_URL": "postgresql://localhost/tidegate",
            "REDIS_URL": "redis://localhost",
            "TIDEGATE_INTERNAL_TOKEN": "-" * SHORTEST_SECRET,
            "TIDEGATE_SESSION_SECRET": "-" * SHORTEST_SECRET,
        }
        try:
            Settings.from_env({**stand_ins, **self._given})
        except SettingsError as error:
            raise LocalError(f"{error}; correct it or unset it", ExitCode.USAGE) from None

    def _listeners(self) -> list[ports.Listener]:
        """Who will listen on this machine."""
        chosen, host = self.options.ports, self.options.host
        found = [
            ports.Listener(chosen.control, "the control plane", "--port-control", host),
            ports.Listener(chosen.gateway, "the gateway", "--port-gateway", host),
        ]
        if self.options.replica:
            found.append(ports.Listener(chosen.replica, "the replica", "--port-replica"))
        if not self._given.get("DATABASE_URL"):
            found.append(ports.Listener(chosen.postgres, "PostgreSQL", "--port-postgres"))
        if not self._given.get("REDIS_URL"):
            found.append(ports.Listener(chosen.valkey, "Valkey", "--port-valkey"))
        return found

    def _stores(self) -> tuple[Secret, Secret]:
        """The database's and Redis's URLs: given ones that were seen to work, or embedded servers started now."""
        assert self._supervisor is not None
        database_url, redis_url = (Secret(self._given.get(name, "")) for name in ("DATABASE_URL", "REDIS_URL"))
        if database_url:
            self._progress.step("postgres")
            self._progress.done("postgres", f"{external.database_version(database_url)} of DATABASE_URL")
        else:
            postgres = EmbeddedPostgres(self.home.postgres, self.options.ports.postgres, log=self.home.log("postgres"))
            self._supervisor.launch([ServerUnit("postgres", postgres)])
            database_url = Secret(postgres.url)
        if redis_url:
            self._progress.step("valkey")
            self._progress.done("valkey", f"{external.redis_version(redis_url)} of REDIS_URL")
        else:
            valkey = EmbeddedValkey(self.home.valkey, self.options.ports.valkey, log=self.home.log("valkey"))
            self._supervisor.launch([ServerUnit("valkey", valkey, ready_within=30.0)])
            redis_url = Secret(valkey.url)
        return database_url, redis_url

    def _settings(self, database_url: Secret, redis_url: Secret) -> tuple[Settings, dict[str, str]]:
        """The settings of every process, and the environment that carries them. What the user set stays."""
        assert self._supervisor is not None
        options = self.options
        defaults = {
            "TIDEGATE_INTERNAL_TOKEN": self.home.secret("internal").reveal(),
            "TIDEGATE_SESSION_SECRET": self.home.secret("session").reveal(),
            "TIDEGATE_METRICS_TOKEN": self.home.secret("metrics").reveal(),
            "TIDEGATE_PUBLIC_GATEWAY_URL": _url(options.host, options.ports.gateway),
            "TIDEGATE_GATEWAY_ID": GATEWAY_ID,
            "TIDEGATE_REPLICA_NETWORKS": egress.LOOPBACK,
            "PYTHONUNBUFFERED": "1",
        }
        ours = {
            "DATABASE_URL": database_url.reveal(),
            "REDIS_URL": redis_url.reveal(),
            "TIDEGATE_HOME": str(self.home.path),
            "TIDEGATE_CONTROL_URL": _url(options.host, options.ports.control),
            **self._supervisor.environment,
        }
        environment = {**defaults, **self._given, **ours}
        return Settings.from_env(environment), environment

    def _migrate(self, database_url: Secret) -> None:
        self._progress.step("migrations")
        try:
            before = migrate.current(database_url)
            migrate.upgrade(database_url)
        except (SQLAlchemyError, OSError) as error:
            raise LocalError(
                f"the database cannot be migrated: {type(error).__name__}; see `tidegate db upgrade` for the details",
                ExitCode.SERVICE_UNREACHABLE,
            ) from None
        now = migrate.head()
        self._progress.done("migrations", f"at {now}" if before == now else f"{before or 'empty'} → {now}")

    def _wait_for_route(self, settings: Settings, admin: Admin) -> None:
        """Until the gateway, too, has heard that the replica is READY: from then on the first request is answered."""
        assert self._supervisor is not None
        self._progress.step("route")
        probe = RouteProbe(
            control_url=settings.control_url,
            gateway_url=_url(self.options.host, self.options.ports.gateway),
            replica_url=_url(ports.LOOPBACK, self.options.ports.replica),
            api_token=Secret(admin.api_token),
            metrics_token=settings.metrics_token or settings.internal_token,
        )
        begin = time.monotonic()
        while (seen := probe()) is None:
            if time.monotonic() - begin > ROUTED_WITHIN_S:
                log = self.home.log("gateway")
                raise LocalError(f"the gateway heard of no ready replica within {ROUTED_WITHIN_S:.0f} s (log: {log})")
            self._supervisor.turn(PROBE_EVERY_S)
        self._progress.done("route", seen)

    def _units(self, environment: dict[str, str], settings: Settings, pool: str, served: str) -> list[Unit]:
        options, chosen = self.options, self.options.ports
        units: list[Unit] = [
            self._serve("control", options.host, chosen.control, environment),
            self._serve("gateway", options.host, chosen.gateway, environment),
            ProcessUnit(
                ProcessSpec(
                    name="worker",
                    command=[*TIDEGATE, "worker"],
                    environment=environment,
                    log=self.home.log("worker"),
                    cwd=self.home.path,
                    ready=WorkerProbe(settings.redis_url),
                )
            ),
        ]
        if options.replica:
            spec = ReplicaSpec(
                replica=f"{pool}-0",
                pool=pool,
                model=options.model,
                served_model=served,
                host=ports.LOOPBACK,
                port=chosen.replica,
                control_url=settings.control_url,
                arguments=options.engine_arguments,
            )
            # The engine shares this machine's cores with all the others: threads that spin at a barrier while they wait
            # would hold up the very thread they wait for.
            own = {"OMP_WAIT_POLICY": "PASSIVE", **environment}
            for store in ("DATABASE_URL", "REDIS_URL"):
                own.pop(store)
            launcher = ProcessLauncher(self.home.path, own, self.home.logs)
            units.append(ReplicaUnit("replica", launcher, spec))
        return units

    def _serve(self, role: str, host: str, port: int, environment: dict[str, str]) -> ProcessUnit:
        return ProcessUnit(
            ProcessSpec(
                name=role,
                command=[*TIDEGATE, "serve", role, "--host", host, "--port", str(port)],
                environment=environment,
                log=self.home.log(role),
                cwd=self.home.path,
                ready=lambda: answers_ok(f"{_url(host, port)}/healthz"),
            )
        )


def _set(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without our variables that are empty: those are as good as unset, but for the metrics token."""
    return {
        name: value
        for name, value in environment.items()
        if value or name == "TIDEGATE_METRICS_TOKEN" or not name.startswith(("TIDEGATE_", "DATABASE_URL", "REDIS_URL"))
    }


def model_names(model: str) -> tuple[str, str]:
    """The pool's name and the name under which tenants ask for `model`."""
    if model == DEMO_MODEL:
        return DEMO_MODEL, DEMO_SERVED
    path = Path(model)
    if not path.exists():
        raise LocalError(
            f"--model {model}: there is no such file or folder, and it is not {DEMO_MODEL}", ExitCode.USAGE
        )
    stem = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower() if path.is_file() else path.name.lower()).strip("-._")[:60]
    name = stem or "model"
    return name, name


def _url(host: str, port: int) -> str:
    """As a client on this machine reaches it."""
    host = {"0.0.0.0": ports.LOOPBACK, "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
