"""A gateway for tests: the real endpoint in the real server, with policy held in memory."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
from litestar import Litestar
from prometheus_client import CollectorRegistry

from controlplane.admission.leases import Leases
from controlplane.fleet.schemas import FleetView, PoolRoute, ReplicaRoute
from controlplane.gateway.auth import KeyDirectory
from controlplane.gateway.component import mount
from controlplane.gateway.dispatch import Dispatch
from controlplane.gateway.dispatch_metrics import DispatchMetrics
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.gateway import Gateway
from controlplane.gateway.lease_metrics import LeaseCollector
from controlplane.gateway.loads import LoadBoard
from controlplane.gateway.metering import Meter
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.quotas import QuotaDirectory
from controlplane.gateway.request_log import RequestLog
from controlplane.gateway.telemetry import Recorder
from controlplane.gateway.usage import UsageLog
from controlplane.http.server import HttpServer
from controlplane.ledger.spool import BEGINNING
from controlplane.quotas.schemas import Limit, Price, TenantQuotas
from controlplane.redis_client import create_redis
from controlplane.redis_pipe import ScriptPipe
from controlplane.settings import Settings
from controlplane.tenants.keys import mint
from controlplane.tenants.schemas import KeyGrant
from dataplane.protocol import GatewayCounters, ReplicaState, UsageRecord
from tests.controlplane.gateway.replicas import DONE, FakeReplica
from tests.services import loopback_socket

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


@dataclass
class Policy:
    """Keys and fleet as Postgres would hold them. `away` makes every read fail."""

    grants: dict[str, KeyGrant] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    """Of every tenant."""
    prices: tuple[Price, ...] = ()
    ledger: int = 0
    """Units the ledger has for any counter."""
    view: FleetView = field(default_factory=lambda: FleetView(epoch=1, pools=[], replicas=[]))
    away: bool = False
    reads: int = 0

    def key(self, **fields: object) -> str:
        """A new key's text."""
        minted = mint()
        values: dict[str, object] = {
            "key_id": minted.key_id,
            "secret_hash": minted.secret_hash,
            "tenant_id": "tenant-id-acme",
            "tenant": "acme",
            "cache_salt": "salt-acme",
            "allowed_models": None,
            "revoked": False,
            "tenant_active": True,
        }
        grant = KeyGrant(**{**values, **fields})
        self.grants[grant.key_id] = grant
        return minted.plain.reveal()

    async def load_grant(self, key_id: str) -> KeyGrant | None:
        self.reads += 1
        await asyncio.sleep(0)
        if self.away:
            raise ConnectionRefusedError
        return self.grants.get(key_id)

    async def load_quotas(self, tenant_id: str) -> TenantQuotas | None:
        if self.away:
            raise ConnectionRefusedError
        return TenantQuotas(
            tenant_id=tenant_id,
            tenant="acme",
            time_zone="UTC",
            limits=self.limits,
            prices=self.prices,
            epoch=1,
        )

    async def sum_ledger(self, *_: object) -> tuple[int, float]:
        if self.away:
            raise ConnectionRefusedError
        return self.ledger, time.time()

    async def load_fleet(self) -> FleetView:
        if self.away:
            raise ConnectionRefusedError
        return self.view

    def change(self, key: str, **fields: object) -> KeyGrant:
        """Change the grant of a key's text."""
        key_id = key.split("_")[1]
        self.grants[key_id] = msgspec.structs.replace(self.grants[key_id], **fields)
        return self.grants[key_id]


def route(replica: FakeReplica | str, name: str, state: ReplicaState = ReplicaState.READY) -> ReplicaRoute:
    url = replica if isinstance(replica, str) else replica.url
    return ReplicaRoute(replica=name, pool="pool-m", url=url, state=state, boot_epoch=1)


def fleet(*routes: ReplicaRoute, models: tuple[str, ...] = ("m",)) -> FleetView:
    pools = [PoolRoute(name=f"pool-{model}", model=model, backend="native", created_at=1000.5) for model in models]
    return FleetView(epoch=1, pools=pools, replicas=list(routes))


@dataclass
class Running:
    """A gateway that serves, and a client for it."""

    gateway: Gateway
    recorder: Recorder
    policy: Policy
    registry: CollectorRegistry
    key: str
    url: str
    log_path: Path
    client: aiohttp.ClientSession

    async def usage(self) -> list[UsageRecord]:
        """What the gateway has put down for the ledger, in order."""
        spool = self.gateway.usage._spool
        assert spool is not None
        while spool._flushing is not None:
            await asyncio.sleep(0.01)
        entries = (await spool.read(BEGINNING, 10_000)).entries
        return [msgspec.msgpack.decode(entry.payload, type=UsageRecord) for entry in entries]

    def post(self, body: object, *, path: str = "/v1/chat/completions", key: str | None = None, **kwargs: object):
        """A request with the default key; `body` is JSON unless it is bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = raw if len(raw) < 500_000 else io.BytesIO(raw)
        headers = {"authorization": f"Bearer {key or self.key}", **kwargs.pop("headers", {})}  # type: ignore[arg-type]
        return self.client.post(self.url + path, data=data, headers=headers, **kwargs)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"tidegate_gateway_{name}", labels) or 0.0

    def counters(self) -> dict[tuple[str, str, str], GatewayCounters]:
        """Everything counted so far by tenant, pool and replica."""
        total: dict[tuple[str, str, str], GatewayCounters] = {}
        windows, _ = self.recorder.pending()
        self.recorder.refused()
        for window in windows:
            for series in window.series:
                key = (series.tenant, series.pool, series.replica)
                total.setdefault(key, GatewayCounters()).merge(series.counters)
        return total

    def total(self) -> GatewayCounters:
        total = GatewayCounters()
        for (tenant, _, _), counters in self.counters().items():
            if tenant != "(no usable key)":
                total.merge(counters)
        return total

    async def lines(self) -> list[dict[str, object]]:
        """The request log."""
        await self.gateway.request_log.flush()
        return [json.loads(line) for line in self.log_path.read_text().splitlines()] if self.log_path.exists() else []

    async def settled(self, requests: int) -> None:
        """Wait until so many requests have ended."""
        async with asyncio.timeout(10):
            while len(await self.lines()) < requests:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_gateway(
    settings: Settings,
    *routes: ReplicaRoute,
    models: tuple[str, ...] = ("m",),
    listening: bool = True,
    limits: tuple[Limit, ...] = (),
    prices: tuple[Price, ...] = (),
    leases: Leases | None = None,
    spool_bytes: int = 1 << 24,
) -> AsyncIterator[Running]:
    """A gateway process's request side, in this loop, on a free port; leases lie in the Redis of `settings`."""
    policy = Policy(view=fleet(*routes, models=models), limits=limits, prices=prices)
    registry = CollectorRegistry()
    keys = KeyDirectory(policy.load_grant)
    directory = FleetDirectory(policy.load_fleet)
    await directory.refresh()
    quotas = QuotaDirectory(policy.load_quotas)
    redis = create_redis(settings.redis_url)
    pipe = ScriptPipe(settings.redis_url)
    leases = leases or Leases(pipe, deadline_s=settings.lease_deadline_ms / 1000, ttl_s=settings.lease_ttl_s)
    renewing = asyncio.create_task(leases.run())
    if listening:
        keys.on_listening()
        quotas.on_listening()
        directory.on_listening()
    metrics = GatewayMetrics(registry)
    LeaseCollector(leases, registry)
    log_path = settings.home / "gateway" / secrets.token_hex(4) / "requests.jsonl"
    recorder = Recorder()
    usage = UsageLog(log_path.parent / "usage", redis, gateway="gateway-0", max_bytes=spool_bytes)
    usage.open()
    board = LoadBoard(settings.stale_after_s)
    gateway = Gateway(
        settings,
        keys=keys,
        fleet=directory,
        meter=Meter(
            leases,
            quotas,
            directory,
            policy.sum_ledger,
            assumed_context=settings.assumed_context,
            on_refused=metrics.quota_refused,
        ),
        board=board,
        recorder=recorder,
        request_log=RequestLog(log_path, on_dropped=metrics.log_lines_dropped.inc),
        usage=usage,
        metrics=metrics,
        dispatch=Dispatch(redis, pipe, settings, directory, board, metrics=DispatchMetrics(registry)),
    )
    gateway.open()
    for model in models:
        gateway.dispatch.line(model)
    app = Litestar(route_handlers=[mount(gateway)], openapi_config=None)
    listening = loopback_socket()
    port = listening.getsockname()[1]
    server = HttpServer(app, listening)
    serving = asyncio.create_task(server.serve())
    client = aiohttp.ClientSession()
    url = f"http://127.0.0.1:{port}"
    try:
        await _reachable(port)
        yield Running(gateway, recorder, policy, registry, policy.key(), url, log_path, client)
    finally:
        await client.close()
        server.stop()
        async with asyncio.timeout(10):
            await serving
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await usage.close()
        await leases.close()
        await redis.aclose()
        await quotas.close()
        await keys.close()
        await gateway.close()
        await pipe.close()
        await redis.aclose()


async def _reachable(port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return


def check_error(body: dict[str, object], code: str) -> dict[str, object]:
    """The OpenAI error shape, with this code."""
    assert list(body) == ["error"]
    detail = body["error"]
    assert isinstance(detail, dict)
    assert set(detail) == {"message", "type", "param", "code"}
    assert detail["code"] == code
    assert detail["message"]
    return detail


def own_tasks() -> set[str]:
    """Names of this gateway's tasks for requests: one to relay, one to watch."""
    running = {task.get_coro().__qualname__ for task in asyncio.all_tasks() if task.get_coro() is not None}  # type: ignore[union-attr]
    return {name for name in running if "Exchange" in name or "client_left" in name}


def upstream_connections(served: Running) -> int:
    """Connections to replicas that are in use."""
    assert served.gateway._upstream is not None
    return served.gateway._upstream.in_use


async def assert_nothing_left(served: Running) -> None:
    """No request, task, connection or count; the last answer may have overtaken its own clean-up by a moment."""
    async with asyncio.timeout(5):
        while served.gateway.in_flight or served.gateway._running or own_tasks():
            await asyncio.sleep(0.005)
    assert served.gateway.in_flight == 0
    assert not served.gateway._running
    assert own_tasks() == set()
    assert upstream_connections(served) == 0
    for view in served.policy.view.replicas:
        assert served.gateway.board.in_flight(view.replica) == 0


def head_of(served: Running, length: int = 99) -> bytes:
    """A request's head, for tests that write to the socket themselves."""
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {served.key}"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


async def stream_error(response: aiohttp.ClientResponse) -> dict[str, object]:
    """The error event a broken stream ends with."""
    body = await response.read()
    assert not body.endswith(DONE)
    last = body.rstrip(b"\n").rsplit(b"\n\n", 1)[-1]
    assert last.startswith(b"data: ")
    error: dict[str, object] = json.loads(last[6:])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
