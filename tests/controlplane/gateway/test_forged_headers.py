"""F23: identity comes from the key alone, on every route below /v1."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.gateway import endpoint
from controlplane.gateway.telemetry import STRANGERS
from controlplane.quotas.schemas import QuotaKind
from controlplane.settings import Settings
from dataplane import protocol
from tests.controlplane.gateway.harness import CHAT, STREAM, Running, route, running_gateway
from tests.controlplane.gateway.metered import all_settled, limit, used
from tests.controlplane.gateway.replicas import FakeReplica

INSIDE = {
    value for name, value in vars(protocol).items() if name.startswith("HEADER_") and value.startswith("x-tidegate-")
}
"""Every header by which one of our processes tells another something."""
VICTIM = "victim-7d1e"
PROXIES = [
    "x-forwarded-user",
    "x-forwarded-email",
    "x-forwarded-groups",
    "x-forwarded-for",
    "x-forwarded-host",
    "forwarded",
    "x-real-ip",
    "x-remote-user",
    "remote-user",
    "x-auth-request-user",
    "x-auth-request-email",
    "x-authenticated-user",
    "x-user-id",
    "x-tenant-id",
    "x-api-key",
    "api-key",
    "openai-organization",
    "openai-project",
    "x-goog-authenticated-user-email",
    "x-amzn-oidc-identity",
    "cookie",
    "proxy-authorization",
    "x-original-url",
    "x-http-method-override",
]
FORGED = dict.fromkeys(INSIDE, VICTIM) | {"X-Tidegate-Made-Up": VICTIM}
INFERENCE = [(path, body) for path in endpoint.INFERENCE for body in (CHAT, STREAM)]


def a_body(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/completions":
        return {"model": body["model"], "prompt": "hi", "stream": body.get("stream", False)}
    return body


@pytest.mark.parametrize(("path", "body"), INFERENCE)
async def test_f23_nothing_forged_reaches_a_replica_or_the_client(
    served: Running, replica: FakeReplica, path: str, body: dict[str, Any]
) -> None:
    plain = a_body(path, body)
    async with served.post(plain, path=f"/v1{path}") as honest:
        await honest.read()
    async with served.post(plain, path=f"/v1{path}", headers={**FORGED, **dict.fromkeys(PROXIES, VICTIM)}) as forged:
        await forged.read()
    assert honest.status == forged.status == 200
    assert VICTIM not in str(dict(forged.headers))
    before, after = replica.seen
    assert VICTIM not in str(after)
    changing = {protocol.HEADER_ATTEMPT, protocol.HEADER_REQUEST, protocol.HEADER_ARRIVED}
    assert {k: v for k, v in after.headers.items() if k not in changing} == {
        k: v for k, v in before.headers.items() if k not in changing
    }
    assert served.metric("forged_headers_total") == len(FORGED)
    assert served.counters()["acme", "", ""].forged == len(FORGED)


async def test_f23_routes_that_are_no_inference_and_strangers_are_counted_too(served: Running) -> None:
    headers = {"authorization": f"Bearer {served.key}", **FORGED}
    async with served.client.get(f"{served.url}/v1/models", headers=headers) as listed:
        assert listed.status == 200
    async with served.post(CHAT, key="tg_nobody", headers=FORGED) as refused:
        assert refused.status == 401
    async with served.client.get(f"{served.url}/v1/nothing/here", headers=headers) as nowhere:
        assert nowhere.status == 404
    assert served.metric("forged_headers_total") == 3 * len(FORGED)
    counted = served.counters()
    assert counted["acme", "", ""].forged == len(FORGED)
    assert counted[STRANGERS, "", ""].forged == 2 * len(FORGED)


@pytest.mark.parametrize(("path", "body"), INFERENCE)
async def test_f23_nothing_forged_changes_whose_limit_applies(
    settings: Settings, replica: FakeReplica, path: str, body: dict[str, Any]
) -> None:
    """The second request of a tenant with one a minute is refused, whoever it says to be; the victim loses nothing."""
    one = limit(QuotaKind.REQUESTS_PER_MINUTE, 1)
    async with running_gateway(settings, route(replica, "r0"), limits=(one,)) as served:
        victim = served.policy.key(tenant=VICTIM, tenant_id="tenant-id-victim")
        claims = {**FORGED, **dict.fromkeys(PROXIES, victim), protocol.HEADER_KEY: victim.split("_")[1]}
        statuses = []
        for _ in range(2):
            async with served.post(a_body(path, body), path=f"/v1{path}", headers=claims) as response:
                await response.read()
                statuses.append(response.status)
        await all_settled(served)
        assert statuses == [200, 429]
        assert await used(served, one) == 1
        assert {entry["tenant"] for entry in await served.lines()} == {"acme"}
        assert [seen.headers[protocol.HEADER_TENANT] for seen in replica.seen] == ["acme"]
