"""`/v1/quota` on the whole application: a tenant's key reads its limits, headroom, forecast and refusals, and asks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import openai
import pytest
from msgspec import structs
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.db import transaction
from controlplane.ledger import service as ledger
from controlplane.quotas import request_service
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import Away, QuotaKind
from controlplane.quotas.views import ApprovalSpec, GrantSpec, QuotaSpec, QuotaView
from controlplane.settings import Secret, Settings
from controlplane.telemetry import intake
from controlplane.tenants import projects
from controlplane.tenants.schemas import Scope, TenantPatch
from controlplane.tenants.service import change_tenant, create_key
from tests.controlplane.admission.test_leases_away import a_store
from tests.controlplane.gateway.deployment import Deployed, deployed_gateway
from tests.controlplane.gateway.replicas import FakeReplica, fake_replica
from tests.controlplane.gateway.test_enforcement import DEADLINE_MS, Operator
from tests.controlplane.telemetry.reports import gateway_report, usage
from tests.factories.cut import cuttable

RPM, DAY, MONTH, MONEY = (
    QuotaKind.REQUESTS_PER_MINUTE,
    QuotaKind.TOKENS_PER_DAY,
    QuotaKind.TOKENS_PER_MONTH,
    QuotaKind.MONEY_PER_DAY,
)
ALL = (Scope.INFERENCE, Scope.QUOTA_READ, Scope.QUOTA_REQUEST)
Answer = tuple[int, Any, Any]


class Clerk(Operator):
    """An operator who also makes keys with scopes."""

    async def scoped_key(self, slug: str, *scopes: Scope, project: str = "default") -> str:
        async with transaction(self.engine) as session:
            made = await create_key(session, tenant_slug=slug, name="k", scopes=scopes or ALL, project=project)
        return made.plain.reveal()

    async def decide(self, request_id: str, given: ApprovalSpec | None, note: str = "") -> None:
        async with transaction(self.engine) as session:
            open_one = (await request_service.list_requests(session)).items
            uuid = next(one.id for one in open_one if str(one.id) == request_id)
            if given is None:
                await request_service.decline(session, uuid, by="ada", note=note)
            else:
                await request_service.approve(session, uuid, by="ada", given=given)


@pytest.fixture
def wide(settings: Settings) -> Settings:
    return structs.replace(settings, lease_deadline_ms=DEADLINE_MS)


@pytest.fixture
async def operator(wide: Settings) -> AsyncIterator[Clerk]:
    operator = Clerk(wide)
    await operator.pool("pool-m", "m")
    yield operator
    await operator.close()


@pytest.fixture
async def replica(operator: Clerk) -> AsyncIterator[FakeReplica]:
    async with fake_replica() as running:
        await operator.replica("r0", "pool-m", running.url)
        yield running


@pytest.fixture
async def gateway(wide: Settings, replica: FakeReplica) -> AsyncIterator[Deployed]:
    async with deployed_gateway(wide) as running:
        yield running


async def ask(gateway: Deployed, key: str, path: str = "", **body: object) -> Answer:
    """Status, decoded body and headers of a GET below /v1/quota, or with `body` of a POST."""
    headers = {"authorization": f"Bearer {key}", "idempotency-key": str(body.pop("idempotency_key", "")) or "once"}
    method = "POST" if body else "GET"
    data = json.dumps(body) if body else None
    async with gateway.client.request(method, f"{gateway.url}/v1/quota{path}", data=data, headers=headers) as response:
        return response.status, await response.json(), response.headers


def code(answer: Answer) -> tuple[int, str | None, str | None]:
    status, body, _ = answer
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["code"], body["error"]["param"]


def by_id(answer: Answer) -> dict[str, Any]:
    status, body, _ = answer
    assert status == 200, body
    return {one["id"]: one for one in body["data"]}


async def once_settled(gateway: Deployed, key: str, quota_id: str) -> dict[str, Any]:
    """What is told once nothing is reserved: a client has its answer a moment before its lease is settled."""
    async with asyncio.timeout(15):
        while (found := by_id(await ask(gateway, key)))[quota_id]["reserved"]:
            await asyncio.sleep(0.3)
    return found


async def test_a_key_reads_the_limits_that_concern_it_and_no_others(gateway: Deployed, operator: Clerk) -> None:
    await operator.tenant("acme")
    await operator.tenant("globex")
    async with transaction(operator.engine) as session:
        await projects.create_project(session, "acme", slug="search", name="Search")
        await change_tenant(session, "acme", TenantPatch(time_zone="Asia/Tokyo"))
    key = await operator.scoped_key("acme", project="search")
    own = key.split("_")[1]
    mine = {
        "tenant": await operator.quota("acme", DAY, 1000, soft=900),
        "project": await operator.quota("acme", RPM, 7, project="search", model="m"),
        "key": await operator.quota("acme", QuotaKind.MAX_PROMPT_TOKENS, 512, key=own),
    }
    other = await operator.scoped_key("acme")
    foreign = [
        await operator.quota("acme", RPM, 5, project="default"),
        await operator.quota("acme", RPM, 5, key=other.split("_")[1]),
        await operator.quota("globex", RPM, 5),
    ]
    async with transaction(operator.engine) as session:
        ends = datetime.now(UTC) + timedelta(hours=3)
        await quotas.grant(session, mine["tenant"].id, GrantSpec(amount=50, expires_at=ends, reason="x"), by="ada")
    found = by_id(await ask(gateway, key))
    assert set(found) == {str(each.id) for each in mine.values()}
    assert not any(str(each.id) in json.dumps(found) for each in foreign)
    day = found[str(mine["tenant"].id)]
    assert (day["level"], day["kind"], day["model"]) == ("tenant", "tokens_per_day", None)
    assert (day["hard"], day["soft"], day["declared_hard"]) == (1050, 950, 1000)
    assert [one["amount"] for one in day["grants"]] == [50]
    assert datetime.fromisoformat(day["grants"][0]["expires_at"]) == ends
    resets = datetime.fromisoformat(day["resets_at"])
    assert resets.utcoffset() == timedelta(hours=9)
    assert (resets.hour, resets.minute) == (0, 0)
    assert resets.date() == datetime.now(ZoneInfo("Asia/Tokyo")).date() + timedelta(days=1)
    size = found[str(mine["key"].id)]
    assert (size["source"], size["used"], size["window"], size["hard"]) == ("request", None, "request", 512)
    assert set(by_id(await ask(gateway, key, "?model=m"))) == {str(mine["project"].id)}


async def test_what_runs_is_reserved_and_what_ended_is_used(
    gateway: Deployed, operator: Clerk, replica: FakeReplica
) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    day = str((await operator.quota("acme", DAY, 100_000)).id)
    minute = str((await operator.quota("acme", RPM, 10, soft=1)).id)
    running = str((await operator.quota("acme", QuotaKind.CONCURRENT_REQUESTS, 3)).id)
    assert await gateway.status(key, max_tokens=10) == (200, "")
    found = await once_settled(gateway, key, day)
    assert (found[day]["used"], found[day]["reserved"], found[day]["source"]) == (15, 0, "live")
    assert found[day]["remaining"] == 100_000 - 15
    assert (found[minute]["used"], found[minute]["remaining"], found[minute]["state"]) == (1, 9, "ok")
    going, go_on = asyncio.Event(), asyncio.Event()
    answer = replica.behave

    async def slow(request: Any, body: bytes) -> Any:
        going.set()
        await go_on.wait()
        return await answer(request, body)

    replica.behave = slow
    task = asyncio.create_task(gateway.status(key, max_tokens=10))
    await asyncio.wait_for(going.wait(), 10)
    found = by_id(await ask(gateway, key))
    assert (found[running]["used"], found[running]["reserved"], found[running]["remaining"]) == (0, 1, 2)
    assert found[day]["used"] == 15
    assert found[day]["reserved"] >= 10
    assert found[day]["remaining"] == 100_000 - 15 - found[day]["reserved"]
    assert (found[minute]["used"], found[minute]["reserved"], found[minute]["state"]) == (1, 1, "above_soft")
    go_on.set()
    assert await task == (200, "")
    found = await once_settled(gateway, key, day)
    assert (found[day]["used"], found[day]["reserved"]) == (30, 0)
    assert (found[running]["used"], found[running]["reserved"]) == (0, 0)


async def test_f9_a_store_that_forgot_is_told_by_the_ledger_and_hydrated_by_nobody(
    gateway: Deployed, operator: Clerk
) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    day = str((await operator.quota("acme", DAY, 1000)).id)
    await spend(operator.engine, key, 3)
    for _ in range(2):
        found = by_id(await ask(gateway, key))[day]
        assert (found["used"], found["reserved"], found["source"]) == (3 * 35, None, "ledger")
        assert found["remaining"] == 1000 - 3 * 35
        assert datetime.fromisoformat(found["as_of"]) < datetime.now(UTC)


async def spend(engine: AsyncEngine, key: str, attempts: int, ago_s: float = 15.0) -> None:
    """So many attempts of 35 tokens in the ledger."""
    now = time.time()
    records = [
        usage(
            f"a-{key[:14]}-{number}-{ago_s}",
            tenant="acme",
            project="default",
            key_id=key.split("_")[1],
            started_at=now - ago_s - 1,
            finished_at=now - ago_s,
            model="m",
        )
        for number in range(attempts)
    ]
    async with transaction(engine) as session:
        await ledger.record(session, records)


async def test_f11_with_redis_away_a_use_is_as_last_known_or_null_with_its_reason_never_zero(
    wide: Settings, operator: Clerk, replica: FakeReplica
) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    day = str((await operator.quota("acme", DAY, 1000)).id)
    minute = str((await operator.quota("acme", RPM, 10, away=Away.OPEN)).id)
    await spend(operator.engine, key, 2)
    with a_store() as store:
        async with deployed_gateway(structs.replace(wide, redis_url=Secret(store.url))) as gateway:
            assert by_id(await ask(gateway, key))[minute]["used"] == 0
            store.stop()
            found = by_id(await ask(gateway, key))
            assert (found[minute]["used"], found[minute]["remaining"]) == (None, None)
            assert (found[minute]["source"], found[minute]["unknown_because"]) == ("unknown", "redis_away")
            assert found[minute]["state"] == "unknown"
            assert (found[day]["used"], found[day]["source"], found[day]["reserved"]) == (70, "ledger", None)
            told = by_id(await ask(gateway, key, "/forecast"))
            assert (told[minute]["outcome"], told[minute]["exhausts_at"]) == ("unknown", None)


async def test_f15_with_postgres_away_what_the_store_knows_is_told_and_the_rest_is_503_at_once(
    wide: Settings, operator: Clerk, replica: FakeReplica
) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    day = str((await operator.quota("acme", DAY, 1000)).id)
    minute = str((await operator.quota("acme", RPM, 10)).id)
    async with AsyncExitStack() as stack:
        database, url = await stack.enter_async_context(cuttable(wide.database_url.reveal()))
        behind = structs.replace(wide, database_url=Secret(url))
        async with deployed_gateway(behind) as gateway:
            assert by_id(await ask(gateway, key))[minute]["used"] == 0
            database.cut()
            found = by_id(await ask(gateway, key))
            assert (found[minute]["used"], found[minute]["source"]) == (0, "live")
            assert (found[day]["used"], found[day]["unknown_because"]) == (None, "ledger_away")
            for path in ("/refusals", "/requests"):
                assert code(await ask(gateway, key, path))[:2] == (503, "policy_unavailable")
            database.mend()
            assert (await ask(gateway, key, "/refusals"))[0] == 200


async def test_the_forecast_says_when_a_limit_is_exhausted_and_what_that_rests_on(
    gateway: Deployed, operator: Clerk
) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    kinds = {
        "soon": await operator.quota("acme", MONTH, 2000),
        "never": await operator.quota("acme", DAY, 10**12),
        "gone": await operator.quota("acme", DAY, 100, model="m"),
        "size": await operator.quota("acme", QuotaKind.MAX_OUTPUT_TOKENS, 5),
        "few": await operator.quota("acme", MONTH, 10**6, model="other"),
        "money": await operator.quota("acme", MONEY, 1000),
    }
    await spend(operator.engine, key, 40)
    found = by_id(await ask(gateway, key, "/forecast"))
    outcomes = {name: found[str(quota.id)]["outcome"] for name, quota in kinds.items()}
    assert outcomes.pop("soon") in {"exhausts", "not_before_reset"}, "the month may be over first"
    assert outcomes == {
        "never": "not_before_reset",
        "gone": "exhausted",
        "size": "not_applicable",
        "few": "not_enough_data",
        "money": "not_before_reset",
    }
    soon = found[str(kinds["soon"].id)]
    assert (soon["n"], soon["method"], soon["used"], soon["hard"]) == (40, "linear", 1400, 2000)
    assert soon["rate_per_s"] == pytest.approx(1400 / soon["window_s"])
    if soon["exhausts_at"] is not None:
        left = datetime.fromisoformat(soon["exhausts_at"]).timestamp() - time.time()
        assert left == pytest.approx(600 / soon["rate_per_s"], rel=0.01)
    assert found[str(kinds["few"].id)]["n"] == 0


async def test_f36_refusals_are_counted_by_reason_for_their_tenant_alone(
    wide: Settings, gateway: Deployed, operator: Clerk
) -> None:
    keys = {slug: await operator.limited_key(slug, RPM, 1) for slug in ("acme", "globex")}
    for slug, times in (("acme", 4), ("globex", 2)):
        for _ in range(times):
            await gateway.status(keys[slug])
    assert (await gateway.status(keys["acme"], model="nobody"))[1] == "model_not_found"
    windows, _ = gateway.gateway.recorder.pending()
    async with transaction(operator.engine) as session:
        for sequence in (1, 2):  # a repeat counts once
            await intake.store(session, [gateway_report(windows, sequence=sequence)], time.time())
    status, body, _ = await ask(gateway, keys["acme"], "/refusals")
    assert status == 200, body
    counted = {(one["code"], one["kind"]): one["count"] for one in body["data"]}
    assert counted == {("requests_per_minute_exceeded", "requests_per_minute"): 3, ("model_not_found", None): 1}
    assert body["total"] == 4
    limited = next(one for one in body["data"] if one["kind"])
    assert sum(one["count"] for one in limited["counts"]) == 3
    assert limited["quota_id"] in by_id(await ask(gateway, keys["acme"]))
    latest = body["latest"]
    assert len(latest) == 4
    assert {one["key"] for one in latest} == {keys["acme"].split("_")[1]}
    assert len({one["request_id"] for one in latest}) == 4
    assert all(one["reason"] for one in latest)
    theirs = (await ask(gateway, keys["globex"], "/refusals"))[1]
    assert [one["count"] for one in theirs["data"]] == [1]
    assert keys["acme"].split("_")[1] not in json.dumps(theirs)
    assert code(await ask(gateway, keys["acme"], "/refusals?window=7"))[1:] == ("invalid_request", "window")


async def test_a_key_asks_for_more_and_is_told_what_became_of_it(gateway: Deployed, operator: Clerk) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    day = await operator.quota("acme", DAY, 1000)
    until = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=0)
    body = {"quota_id": str(day.id), "hard": 1500, "reason": "launch", "until": until.isoformat()}
    status, made, _ = await ask(gateway, key, "/requests", **body)
    assert status == 200, made
    assert (made["state"], made["hard"], made["amount"], made["given"]) == ("open", 1500, 500, None)
    assert (await ask(gateway, key, "/requests", **body))[1] == made
    assert code(await ask(gateway, key, "/requests", **{**body, "hard": 1600}))[:2] == (409, "idempotency_mismatch")
    await operator.decide(made["id"], ApprovalSpec(amount=200, note="for the launch"))
    told = (await ask(gateway, key, f"/requests/{made['id']}"))[1]
    assert (told["state"], told["given"], told["note"]) == ("approved", 200, "for the launch")
    assert datetime.fromisoformat(told["given_until"]) == until
    assert (await ask(gateway, key, "/requests"))[1]["data"] == [told]
    async with asyncio.timeout(5):
        while by_id(await ask(gateway, key))[str(day.id)]["hard"] != 1200:
            await asyncio.sleep(0.6)
    second = (await ask(gateway, key, "/requests", **{**body, "until": None, "idempotency_key": "two"}))[1]
    await operator.decide(second["id"], None, note="no room")
    told = (await ask(gateway, key, f"/requests/{second['id']}"))[1]
    assert (told["state"], told["given"], told["note"]) == ("declined", None, "no room")


async def test_f36_a_key_asks_and_reads_of_nothing_that_it_does_not_meet(gateway: Deployed, operator: Clerk) -> None:
    for slug in ("acme", "globex"):
        await operator.tenant(slug)
    async with transaction(operator.engine) as session:
        await projects.create_project(session, "acme", slug="search", name="Search")
    key = await operator.scoped_key("acme")
    sibling, stranger = await operator.scoped_key("acme", project="search"), await operator.scoped_key("globex")
    own = await operator.quota("acme", RPM, 10, project="default")
    made = (await ask(gateway, key, "/requests", quota_id=str(own.id), hard=20, reason="x"))[1]
    for other in (sibling, stranger):
        asked = await ask(gateway, other, "/requests", quota_id=str(own.id), hard=20, reason="x", idempotency_key="o")
        assert code(asked)[:2] == (404, "quota_not_found")
        assert code(await ask(gateway, other, f"/requests/{made['id']}"))[:2] == (404, "request_not_found")
        assert (await ask(gateway, other, "/requests"))[1]["data"] == []
    assert len((await ask(gateway, key, "/requests"))[1]["data"]) == 1


async def test_f36_a_repeat_under_anothers_idempotency_key_reads_nothing(gateway: Deployed, operator: Clerk) -> None:
    await operator.tenant("acme")
    async with transaction(operator.engine) as session:
        await projects.create_project(session, "acme", slug="search", name="Search")
    key, sibling = await operator.scoped_key("acme"), await operator.scoped_key("acme", project="search")
    own = await operator.quota("acme", RPM, 10, project="default")
    theirs = await operator.quota("acme", RPM, 10, project="search")
    body = {"hard": 20, "reason": "x", "idempotency_key": "shared"}
    made = (await ask(gateway, key, "/requests", quota_id=str(own.id), **body))[1]
    await operator.decide(made["id"], None, note="for your eyes")
    repeated = await ask(gateway, key, "/requests", quota_id=str(own.id), **body)
    assert (repeated[1]["id"], repeated[1]["note"]) == (made["id"], "for your eyes")
    copied = await ask(gateway, sibling, "/requests", quota_id=str(own.id), **body)
    assert code(copied)[:2] == (404, "quota_not_found")
    clashed = await ask(gateway, sibling, "/requests", quota_id=str(theirs.id), **body)
    assert code(clashed)[:2] == (409, "idempotency_mismatch")
    for told in (copied, clashed):
        assert made["id"] not in json.dumps(told[1])
        assert "for your eyes" not in json.dumps(told[1])


async def test_scopes_paths_methods_and_bad_input_are_refused_by_name(gateway: Deployed, operator: Clerk) -> None:
    await operator.tenant("acme")
    blind = await operator.scoped_key("acme", Scope.INFERENCE)
    reader = await operator.scoped_key("acme", Scope.QUOTA_READ)
    key = await operator.scoped_key("acme")
    soft = await operator.quota("acme", DAY, None, soft=10)  # type: ignore[arg-type]
    day = await operator.quota("acme", DAY, 10, model="m")
    for path in ("", "/forecast", "/refusals", "/requests", "/requests/x"):
        assert code(await ask(gateway, blind, path))[:2] == (403, "scope_missing")
    more = {"quota_id": str(day.id), "hard": 20, "reason": "x"}
    assert code(await ask(gateway, reader, "/requests", **more))[:2] == (403, "scope_missing")
    assert code(await ask(gateway, "nonsense"))[0] == 401
    assert code(await ask(gateway, key, "/nothing"))[:2] == (404, "unknown_url")
    assert code(await ask(gateway, key, "", **more))[:2] == (405, "method_not_allowed")
    assert code(await ask(gateway, key, "?limits=3")) == (400, "unknown_parameter", "limits")
    assert code(await ask(gateway, key, "?" + "&".join(f"a{n}=1" for n in range(99))))[0] == 400
    assert code(await ask(gateway, key, "?limit=0")) == (400, "invalid_request", "limit")
    assert code(await ask(gateway, key, "/requests?after=%00")) == (400, "invalid_request", "after")
    assert code(await ask(gateway, key, "?after=x")) == (400, "invalid_request", "after")
    bad = {
        "hard": [{**more, "hard": 10}, {**more, "hard": "20"}, {**more, "hard": 10**16}],
        "reason": [{**more, "reason": ""}, {**more, "reason": "x" * 501}],
        "quota_id": [{**more, "quota_id": str(soft.id)}, {**more, "quota_id": "x"}],
        "until": [{**more, "until": "2020-01-01T00:00:00Z"}, {**more, "until": "2030-01-01T00:00:00"}],
    }
    for param, bodies in bad.items():
        for body in bodies:
            assert code(await ask(gateway, key, "/requests", **body)) == (400, "invalid_request", param), body
    assert code(await ask(gateway, key, "/requests", **more, more=1))[0] == 400
    assert code(await ask(gateway, key, "/requests", **{**more, "reason": "x" * 20_000}))[0] == 413


async def test_a_client_that_leaves_while_it_asks_costs_nothing(
    gateway: Deployed, operator: Clerk, caplog: pytest.LogCaptureFixture
) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
    head = ["POST /v1/quota/requests HTTP/1.1", "host: x", f"authorization: Bearer {key}", "content-length: 50", "", ""]
    writer.write("\r\n".join(head).encode() + b"{")
    await writer.drain()
    writer.close()
    assert (await ask(gateway, key, "/requests"))[1]["data"] == []
    assert not [entry for entry in caplog.records if entry.levelname == "ERROR"]


async def test_open_requests_of_a_tenant_are_bounded_and_questions_of_a_key_rationed(
    gateway: Deployed, operator: Clerk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_service, "MOST_OPEN", 2)
    await operator.tenant("acme")
    key, patient = await operator.scoped_key("acme"), await operator.scoped_key("acme")
    day = await operator.quota("acme", DAY, 10)
    answers = await asyncio.gather(
        *(
            ask(gateway, key, "/requests", quota_id=str(day.id), hard=20, reason="x", idempotency_key=str(number))
            for number in range(6)
        )
    )
    assert sorted(answer[0] for answer in answers) == [200, 200, 409, 409, 409, 409]
    answered = [await ask(gateway, key) for _ in range(40)]
    refused = next(answer for answer in answered if answer[0] != 200)
    assert code(refused)[:2] == (429, "quota_api_rate_exceeded")
    assert int(refused[2]["retry-after"]) >= 1
    assert (await ask(gateway, patient))[0] == 200


async def test_many_limits_are_read_in_pages(gateway: Deployed, operator: Clerk) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    async with transaction(operator.engine) as session:
        made: list[QuotaView] = [
            await quotas.create_quota(session, "acme", QuotaSpec(kind=DAY, hard=number + 1, model=f"m{number}"))
            for number in range(70)
        ]
    found: list[str] = []
    after = ""
    while True:
        _, body, _ = await ask(gateway, key, f"?limit=66{after}")
        found += [one["id"] for one in body["data"]]
        if not body["has_more"]:
            break
        after = f"&after={body['next']}"
    assert len(found) == len(set(found))
    assert set(found) == {str(quota.id) for quota in made}


async def test_the_openai_client_reads_it_and_it_is_metered_as_no_inference(gateway: Deployed, operator: Clerk) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    await operator.quota("acme", DAY, 1000)
    async with openai.AsyncOpenAI(api_key=key, base_url=gateway.url + "/v1", max_retries=0) as client:
        found: Any = await client.get("/quota", cast_to=object)
    assert [one["kind"] for one in found["data"]] == ["tokens_per_day"]
    windows, _ = gateway.gateway.recorder.pending()
    assert windows == []
