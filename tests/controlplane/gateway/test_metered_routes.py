"""Every path that reaches a replica is leased, metered and settled (F3, F6): generated over the table of endpoints.

The check is run on copies of the gateway too that have an endpoint more, each lacking one thing: a new endpoint fails
here until it is metered.
"""

from __future__ import annotations

import time
from collections import defaultdict
from uuid import uuid4

import pytest
from litestar.types import HTTPScope, Receive, Send

from controlplane.admission.charges import NOTHING, Use
from controlplane.gateway import component, endpoint
from controlplane.gateway.asgi import JSON_TYPE, RequestHead, body_slices, read_body, respond
from controlplane.gateway.body import InferenceBody
from controlplane.gateway.endpoint import Endpoint
from controlplane.gateway.exchange import Exchange
from controlplane.gateway.metering import Held, _free
from controlplane.quotas.schemas import QuotaKind
from controlplane.settings import Settings
from controlplane.tenants.schemas import KeyGrant
from dataplane.protocol import HEADER_ATTEMPT, HEADER_KEY, HEADER_PROJECT, HEADER_TENANT, GatewayCounters
from tests.controlplane.gateway.deployment import until
from tests.controlplane.gateway.harness import Running, route, running_gateway
from tests.controlplane.gateway.metered import ASK, ASK_STREAM, USED, all_settled, limit, used
from tests.controlplane.gateway.replicas import FakeReplica, fake_replica

LARGE = 1_000_000
REQUESTS, TOKENS = limit(QuotaKind.REQUESTS_PER_MINUTE, LARGE), limit(QuotaKind.TOKENS_PER_MINUTE, LARGE)
OPENAI_PATHS = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/embeddings",
    "/moderations",
    "/images/generations",
    "/audio/speech",
    "/audio/transcriptions",
    "/audio/translations",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/tokenize",
    "/messages",
    "/batches",
    "/files",
    "/fine_tuning/jobs",
)
"""What OpenAI-compatible servers answer below /v1: an endpoint that nobody lists is found by its name."""
BODIES = (ASK, ASK_STREAM, {"model": "m", "input": "hi", "prompt": "hi"})
NEW = "/embeddings"


async def defects(served: Running, replica: FakeReplica) -> dict[str, set[str]]:
    """By path, what it lacks; one that reaches no replica lacks nothing unless it is in the table."""
    found: dict[str, set[str]] = defaultdict(set)
    served.policy.change(served.key, project="search")
    for path in sorted({*OPENAI_PATHS, *endpoint.INFERENCE}):
        for body in BODIES:
            found[path] |= await _lacks(served, replica, path, body)
    return {path: lacks for path, lacks in found.items() if lacks}


async def _lacks(served: Running, replica: FakeReplica, path: str, body: dict[str, object]) -> set[str]:
    tally, sent, before = served.gateway.meter.leases.tally, len(replica.seen), served.total()
    granted, settled = tally.granted, tally.settled
    requests, tokens = await used(served, REQUESTS), await used(served, TOKENS)
    async with served.post(body, path=f"/v1{path}") as response:
        await response.read()
    await all_settled(served)
    await until(lambda: tally.settled - settled >= tally.granted - granted)
    dispatched, after = len(replica.seen) - sent, served.total()
    if not dispatched:
        return {"answer"} if path in endpoint.INFERENCE else set()
    checks = {
        "table": path in endpoint.INFERENCE,
        "lease": tally.granted - granted == dispatched,
        "settlement": tally.settled - settled == dispatched,
        "headers": "x-ratelimit-remaining-requests" in response.headers,
        "requests": await used(served, REQUESTS) - requests == dispatched,
        "tokens": await used(served, TOKENS) - tokens == USED * dispatched,
        "usage": _counted(after)
        == tuple(map(sum, zip(_counted(before), (dispatched, USED * dispatched), strict=True))),
        "attempt": all(_told(seen.headers) for seen in replica.seen[sent:]),
    }
    return {name for name, holds in checks.items() if not holds}


def _counted(counters: GatewayCounters) -> tuple[int, int]:
    """Requests finished, and the tokens of all."""
    return sum(counters.finished.values()), counters.prompt_tokens + counters.output_tokens


def _told(headers: dict[str, str]) -> bool:
    """Whether the replica knows whose usage it is that it keeps for the ledger."""
    return all(headers.get(name) for name in (HEADER_ATTEMPT, HEADER_TENANT, HEADER_PROJECT, HEADER_KEY))


async def test_f3_f6_every_inference_endpoint_is_leased_metered_and_settled(own: Settings) -> None:
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(REQUESTS, TOKENS)) as served,
    ):
        assert await defects(served, replica) == {}
        assert {seen.path for seen in replica.seen} == {f"/v1{path}" for path in endpoint.INFERENCE}


@pytest.mark.parametrize("path", endpoint.INFERENCE)
@pytest.mark.parametrize("kind", [kind for kind in QuotaKind if not kind.name.startswith("MONEY")])
async def test_f6_nothing_above_a_limit_reaches_a_replica(own: Settings, path: str, kind: QuotaKind) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    if path == "/completions":
        body = {"model": "m", "prompt": "hi", "max_tokens": 5}
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(limit(kind, 0),)) as served,
        served.post(body, path=f"/v1{path}") as response,
    ):
        assert response.status == (400 if kind.name.startswith("MAX") else 429)
        assert (await response.json())["error"]["code"] == f"{kind.value}_exceeded"
        assert not replica.seen


# --------------------------------------------------------------------------------------------------------------
# The check finds what is missing
# --------------------------------------------------------------------------------------------------------------


class Extended(Endpoint):
    """A gateway with one endpoint more."""

    exchange: type[Exchange] = Exchange

    async def __call__(self, scope: HTTPScope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        if scope["path"].rstrip("/") != NEW:
            await super().__call__(scope, receive, send)
            return
        head = RequestHead(scope)
        grant = await self._gateway.keys.authenticate(head.authorization)
        await self.serve(head, grant, receive, send)

    async def serve(self, head: RequestHead, grant: KeyGrant, receive: Receive, send: Send) -> None:
        await self.exchange(self._gateway, grant, NEW, uuid4().hex, time.monotonic()).serve(head, receive, send)


class Bypassing(Extended):
    """Sends requests to a replica on its own."""

    async def serve(self, head: RequestHead, grant: KeyGrant, receive: Receive, send: Send) -> None:
        body, _ = await read_body(head, receive, 10_000, body_slices())
        url = f"{self._gateway.fleet.replicas('m')[0].url}/v1{NEW}"
        response = await self._gateway.post(_free(grant, 0.0), url, {}, body, lambda: None)
        await respond(send, response.status, await response.read(), [JSON_TYPE])


class _Unleased(Exchange):
    async def _metered(self, request: InferenceBody, send: Send) -> None:
        await self._in_turn(Held(lease=_free(self._grant, 0.0)), request, send)


class _Unsettled(Exchange):
    def _used(self, held: Held, request: InferenceBody) -> Use:
        return NOTHING


class _Uncounted(Exchange):
    async def _metered(self, request: InferenceBody, send: Send) -> None:
        self.record.grant = None
        await super()._metered(request, send)

    def _used(self, held: Held, request: InferenceBody) -> Use:
        self.record.grant = self._grant
        try:
            return super()._used(held, request)
        finally:
            self.record.grant = None


class _Anonymous(Exchange):
    def _headers(self, request: InferenceBody) -> dict[str, str]:
        return {}


class Unleased(Extended):
    """Does everything but take a lease."""

    exchange = _Unleased


class Unsettled(Extended):
    """Settles as if nothing had been used."""

    exchange = _Unsettled


class Uncounted(Extended):
    """Counts its requests as nobody's."""

    exchange = _Uncounted


class Anonymous(Extended):
    """Does not say to the replica whose request it is."""

    exchange = _Anonymous


LACKING = {
    Bypassing: {"lease", "settlement", "headers", "requests", "tokens", "usage", "attempt"},
    Unleased: {"lease", "settlement", "headers", "requests", "tokens"},
    Unsettled: {"requests", "tokens"},
    Uncounted: {"usage"},
    Anonymous: {"attempt"},
    Extended: set(),
}


@pytest.mark.parametrize(
    ("kind", "listed"),
    [*((kind, True) for kind in LACKING), (Bypassing, False), (Extended, False)],
    ids=lambda value: value.__name__.lower() if isinstance(value, type) else "listed" if value else "unlisted",
)
async def test_f6_a_new_endpoint_fails_the_check_until_it_is_metered(
    own: Settings, monkeypatch: pytest.MonkeyPatch, kind: type[Extended], listed: bool
) -> None:
    monkeypatch.setattr(component, "Endpoint", kind)
    if listed:
        monkeypatch.setattr(endpoint, "INFERENCE", (*endpoint.INFERENCE, NEW))
    expected = LACKING[kind] | (set() if listed else {"table"})
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), limits=(REQUESTS, TOKENS)) as served,
    ):
        assert await defects(served, replica) == ({NEW: expected} if expected else {})


async def test_f6_an_endpoint_in_the_table_that_reaches_no_replica_proves_nothing(own: Settings) -> None:
    async with (
        fake_replica() as replica,
        running_gateway(own, route(replica, "r0"), models=("other",), limits=(REQUESTS, TOKENS)) as served,
    ):
        assert await defects(served, replica) == {path: {"answer"} for path in endpoint.INFERENCE}
