"""F32: whatever strangers, tenants and replicas send, the label values of /metrics stay those of the registry.

`ALLOWED` names every label there is and what it may read, so a new label has to be thought about here.
"""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Callable

import aiohttp
import httpx
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from controlplane.canaries.schemas import CanaryState
from controlplane.db import transaction
from controlplane.fleet import service as fleet
from controlplane.gateway.dispatch_metrics import BANDS
from controlplane.gateway.lease_metrics import ASKED, ENDED, UNANSWERED
from controlplane.gateway.paths import INFERENCE
from controlplane.gateway.record import Outcome
from controlplane.gateway.upstream import Cause
from controlplane.quotas.schemas import QuotaKind, QuotaLevel
from controlplane.settings import Settings
from controlplane.telemetry import rollups, taskstats
from controlplane.telemetry.metrics import Refusal, Unbilled
from controlplane.telemetry.taskstats import MAX_TASKS, TaskStats
from controlplane.telemetry.windows import ENGINE, GATEWAY
from controlplane.worker import create_worker
from dataplane.protocol import GatewayWindow, ReplicaState, encode
from tests.controlplane.clients import deployment
from tests.controlplane.gateway.deployment import Accounts, deployed_gateway
from tests.controlplane.gateway.harness import CHAT
from tests.controlplane.gateway.replicas import DONE, answer, chunk, event, fake_replica, parts, usage_chunk
from tests.controlplane.telemetry.reports import (
    MODEL,
    POOL,
    counters,
    gateway_report,
    report,
    series,
    usage,
)

OTHER = {"other"}
Allowed = dict[str, Callable[[str], bool] | set[str]]


def allowed(settings: Settings, *, tenants: set[str], models: set[str]) -> Allowed:
    """Label → what it may read."""
    worker = create_worker(settings)
    return {
        "tenant": tenants | OTHER,
        "model": models | OTHER,
        "status": {f"{n}xx" for n in range(1, 6)} | OTHER,
        "outcome": {*Outcome, *taskstats.OUTCOMES} | OTHER,
        "kind": {"prompt", "cached", "output", *QuotaKind},
        "cause": {*Cause, *Refusal, *Unbilled},
        "retried": {"yes", "no"},
        "result": {*ASKED, *ENDED, *UNANSWERED},
        "source": {ENGINE, GATEWAY},
        "state": {*ReplicaState, *CanaryState},
        "band": set(BANDS.values()),
        "how": {"at_once", "waited"},
        "level": set(QuotaLevel),
        "endpoint": set(INFERENCE),
        "gateway": set(settings.probed_gateways),
        "job": set(rollups.JOBS),
        "task": set(worker.conf.beat_schedule) | {name for name in worker.tasks if not name.startswith("celery.")},
        "code": {
            "rate_limit_exceeded",
            "insufficient_quota",
            "deadline_unreachable",
            "deadline_impossible",
            "deadline_passed",
            "queue_full",
            "tenant_queue_full",
            "queue_wait_exceeded",
            "shed",
        },
        "le": lambda value: float(value) > 0,
    }


def assert_within(body: str, registry: Allowed) -> dict[str, set[str]]:
    """Every label of every sample; returns what was found."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            for label, value in sample.labels.items():
                assert label in registry, f"{sample.name} has the label {label!r}, which nobody has thought about"
                rule = registry[label]
                good = rule(value) if callable(rule) else value in rule
                assert good, f"{sample.name} has {label}={value!r}"
                found.setdefault(label, set()).add(value)
    return found


def junk(rng: random.Random, length: int = 40) -> str:
    return "junk" + "".join(rng.choices(string.printable.strip(), k=rng.randrange(1, length)))


def token(rng: random.Random) -> str:
    """Junk that fits into a method, a header's name or a path."""
    return "junk" + "".join(rng.choices(string.ascii_letters + string.digits + "-", k=rng.randrange(1, 20)))


async def junk_answer(request: web.Request, body: bytes) -> web.StreamResponse:
    """A replica that says what it wants: any status, any finish reason, any counts."""
    rng = random.Random(body)
    if rng.random() < 0.5:
        return web.Response(status=rng.choice([200, 299, 404, 418, 499, 599, 700, 999]), text=junk(rng))
    if not json.loads(body).get("stream"):
        return await answer(request, body)
    odd = {"prompt_tokens": rng.choice([-1, 2**60, "many"]), "completion_tokens": junk(rng)}
    return await parts([event(chunk("a")), event(chunk(finish=junk(rng))), event(usage_chunk(odd)), DONE])(
        request, body
    )


async def test_f32_junk_from_tenants_strangers_and_replicas_adds_no_label_value(
    settings: Settings, rng: random.Random
) -> None:
    accounts = Accounts(settings)
    await accounts.tenant("acme")
    await accounts.pool("pool-m", "m")
    key = await accounts.key("acme")
    async with fake_replica(junk_answer) as replica:
        await accounts.replica("r0", "pool-m", replica.url)
        async with deployed_gateway(settings) as gateway:
            for number in range(60):
                body = {
                    **CHAT,
                    "model": rng.choice(["m", junk(rng)]),
                    "stream": rng.random() < 0.5,
                    "user": junk(rng),
                    "seed": number,
                }
                headers = {
                    "authorization": f"Bearer {rng.choice([key, key, key, f'tg_{token(rng)}', token(rng)])}",
                    token(rng): token(rng),
                    "x-tidegate-tenant": token(rng),
                    "x-request-id": token(rng),
                }
                path = rng.choice(["/v1/chat/completions"] * 3 + ["/v1/completions", f"/v1/{token(rng)}", "/v1/models"])
                method = rng.choice(["POST"] * 4 + ["GET", "DELETE", token(rng).upper().replace("-", "")])
                try:
                    async with gateway.client.request(
                        method, gateway.url + path, data=json.dumps(body), headers=headers
                    ) as got:
                        await got.read()
                except aiohttp.ClientError:
                    continue  # a server may drop a method that it does not know
            exposed = await gateway.metrics()
    await accounts.close()
    found = assert_within(exposed, allowed(settings, tenants={"acme"}, models={"m"}))
    assert found["tenant"] == {"acme", "other"}
    assert found["model"] == {"m", "other"}
    assert {"2xx", "4xx"} <= found["status"]
    assert "junk" not in exposed


async def test_f32_junk_in_reports_paths_and_redis_adds_no_label_value(
    settings: Settings, redis: Redis, rng: random.Random
) -> None:
    inside = {"authorization": f"Bearer {settings.internal_token.reveal()}"}
    await TaskStats(redis).count("telemetry.roll_up", "done", 0.5)
    for _ in range(300):
        await redis.hset(taskstats.KEY, f"{junk(rng)} {rng.choice(taskstats.OUTCOMES)}", 1)
    async with deployment(settings) as deployed:
        async with transaction(deployed.app.state.resources.engine) as session:
            await fleet.ensure_pool(session, POOL, MODEL)
        now = time.time()
        start = int(now) // 10 * 10
        for number in range(1, 20):
            name, times = token(rng), {"started_at": now - 2, "finished_at": now - 1}
            records = [usage(token(rng), tenant=token(rng), model=token(rng), replica=name, **times)]
            one = report(name, sequence=number, pool=rng.choice([POOL, token(rng)]), model=token(rng), usage=records)
            odd = counters(finish=token(rng), refused={token(rng): 1}, failed={token(rng): 1})
            two = gateway_report(
                [GatewayWindow(start=start, series=[series(token(rng), odd)])], gateway=token(rng), sequence=number
            )
            for path, body in (("reports", encode(one)), ("gateway-reports", encode(two)), ("reports", b"\xc1")):
                await deployed.client.post(f"/internal/v1/{path}", content=body, headers=inside)
            await deployed.client.request(token(rng), f"/{token(rng)}", headers={token(rng): token(rng)})
        answer = await deployed.client.get("/metrics", headers=inside)
    tasks = {field.decode().rpartition(" ")[0] for field in await redis.hkeys(taskstats.KEY)}
    known = allowed(settings, tenants={"acme"}, models={MODEL})
    seen = {sample.labels["task"] for family in text_string_to_metric_families(answer.text)
            for sample in family.samples if "task" in sample.labels}  # fmt: skip
    assert len(seen) <= MAX_TASKS < len(tasks)
    known["task"] = lambda value: taskstats.NAME.fullmatch(value) is not None
    found = assert_within(answer.text, known)
    assert found["tenant"] == found["model"] == {"other"}
    assert {"telemetry.roll_up"} <= seen


async def assert_closed(client: httpx.AsyncClient, settings: Settings) -> None:
    for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer nonsense"}, {"cookie": "a=b"}):
        for path in ("/metrics", "/metrics/"):
            refused = await client.get(path, headers=headers)
            assert refused.status_code in {401, 404}
            assert "tidegate_" not in refused.text
    good = {"authorization": f"Bearer {settings.internal_token.reveal()}"}
    assert "tidegate_" in (await client.get("/metrics", headers=good)).text


async def test_f32_metrics_are_closed_by_default_on_gateway_and_control_plane(settings: Settings) -> None:
    assert settings.metrics_open is False
    async with deployment(settings) as deployed:
        await assert_closed(deployed.client, settings)
    async with deployed_gateway(settings) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        await assert_closed(client, settings)
