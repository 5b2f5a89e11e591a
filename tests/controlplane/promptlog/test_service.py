"""The opt-in request log in the database: off by default, gone when turned off, and read under an audit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import create_engine, transaction
from controlplane.errors import InvalidRequestError, NotFoundError
from controlplane.promptlog import service
from controlplane.promptlog.schemas import MAX_TEXT, Delivery, LoggedEntry
from controlplane.promptlog.tasks import FORGET
from controlplane.settings import Settings
from controlplane.tenants.schemas import PromptLogging, Redaction
from controlplane.tenants.service import load_key
from controlplane.worker import create_worker
from dataplane.protocol import encode
from tests.controlplane.clients import Deployment, deployment
from tests.factories.rows import make_key, make_tenant

NOW = time.time()


def entry(tenant_id: UUID, number: int = 0, **changes: object) -> LoggedEntry:
    values: dict[str, object] = {
        "tenant_id": tenant_id,
        "at": NOW - number,
        "request_id": f"req-{number}",
        "project": "default",
        "key_id": "key",
        "model": "m",
        "outcome": "finished",
        "reason": "stop",
        "status": 200,
        "prompt": f"prompt {number}",
        "answer": f"answer {number}",
        "cut": False,
        "redactions": 0,
    }
    return LoggedEntry(**{**values, **changes})  # type: ignore[arg-type]


async def rows(session: AsyncSession) -> int:
    return int(await session.scalar(text("SELECT count(*) FROM logged_requests")) or 0)


async def test_nothing_is_kept_of_a_tenant_that_did_not_ask(session: AsyncSession) -> None:
    tenant = await make_tenant(session, "acme")
    assert (await service.show(session, "acme")).log_prompts is False
    grant = await load_key(session, (await make_key(session, "acme")).view.key_id)
    assert grant is not None
    assert grant.prompt_log is None
    assert await service.store(session, [entry(tenant.id), entry(uuid4())]) == 0
    assert await rows(session) == 0


async def test_what_a_tenant_asked_for_reaches_the_gateways_and_is_kept(session: AsyncSession) -> None:
    tenant = await make_tenant(session, "acme")
    key = await make_key(session, "acme")
    wanted = PromptLogging(retention_days=3, sample=0.5, redact=[Redaction.EMAILS], templates=["EMP-####"])
    shown = await service.turn_on(session, "acme", wanted)
    assert (shown.log_prompts, shown.retention_days, shown.sample) == (True, 3, 0.5)
    grant = await load_key(session, key.view.key_id)
    assert grant is not None
    assert grant.prompt_log == wanted
    assert await service.store(session, [entry(tenant.id, number) for number in range(3)]) == 3
    first = await service.list_entries(session, "acme", limit=2)
    assert [one.request_id for one in first.items] == ["req-0", "req-1"]
    rest = await service.list_entries(session, "acme", after=first.next, limit=2)
    assert [one.request_id for one in rest.items] == ["req-2"]
    assert rest.next is None


@pytest.mark.parametrize("template", ["##", "ä###", "x" * 65])
async def test_a_bad_template_is_named(session: AsyncSession, template: str) -> None:
    await make_tenant(session, "acme")
    with pytest.raises(InvalidRequestError) as refused:
        await service.turn_on(session, "acme", PromptLogging(templates=[template]))
    assert refused.value.param == "templates"


async def test_turning_it_off_or_deleting_the_tenant_deletes_everything_at_once(session: AsyncSession) -> None:
    for slug in ("acme", "globex"):
        tenant = await make_tenant(session, slug)
        await service.turn_on(session, slug, PromptLogging())
        await service.store(session, [entry(tenant.id, number) for number in range(5)])
    assert await rows(session) == 10
    assert (await service.turn_off(session, "acme")).log_prompts is False
    assert await rows(session) == 5
    await service.turn_off(session, "acme")
    await session.execute(text("DELETE FROM tenants WHERE slug = 'globex'"))
    assert await rows(session) == 0


async def test_what_arrives_while_it_is_turned_off_is_not_left_behind(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        tenant = await make_tenant(session, "acme")
        await service.turn_on(session, "acme", PromptLogging())

    async def arrive(number: int) -> None:
        async with transaction(committed_engine) as session:
            await service.store(session, [entry(tenant.id, number)])

    async def stop() -> None:
        async with transaction(committed_engine) as session:
            await service.turn_off(session, "acme")

    await asyncio.gather(*(arrive(number) for number in range(8)), stop(), *(arrive(number) for number in range(8, 16)))
    async with transaction(committed_engine) as session:
        assert await rows(session) == 0


async def test_whoever_reads_a_text_is_on_record_and_another_tenants_is_not_found(session: AsyncSession) -> None:
    tenant, other = await make_tenant(session, "acme"), await make_tenant(session, "globex")
    for slug in ("acme", "globex"):
        await service.turn_on(session, slug, PromptLogging())
    await service.store(session, [entry(tenant.id), entry(other.id, 1)])
    (mine,) = (await service.list_entries(session, "acme")).items
    assert (await service.list_reads(session, "acme")).items == []
    read = await service.read_entry(session, "acme", mine.id, reader="ada@example.com")
    assert (read.prompt, read.answer) == ("prompt 0", "answer 0")
    (who,) = (await service.list_reads(session, "acme")).items
    assert (who.reader, who.entry_id, who.request_id) == ("ada@example.com", mine.id, "req-0")
    with pytest.raises(NotFoundError):
        await service.read_entry(session, "globex", mine.id, reader="ada@example.com")
    assert (await service.list_reads(session, "globex")).items == []
    await service.turn_off(session, "acme")
    assert len((await service.list_reads(session, "acme")).items) == 1, "who read what stays known"


async def test_old_requests_go_by_their_tenants_own_days_and_too_many_by_age(session: AsyncSession) -> None:
    day = 86_400
    short, long = await make_tenant(session, "short"), await make_tenant(session, "long")
    await service.turn_on(session, "short", PromptLogging(retention_days=1))
    await service.turn_on(session, "long", PromptLogging(retention_days=30))
    for tenant in (short, long):
        await service.store(session, [entry(tenant.id, age * day + 60) for age in (0, 2, 29, 31)])
    assert await service.forget(session, NOW, limit=100) == 3 + 1
    assert await service.forget(session, NOW, limit=100) == 0
    assert [len((await service.list_entries(session, slug)).items) for slug in ("short", "long")] == [1, 3]
    assert await service.forget(session, NOW, limit=100, max_rows=1) == 2
    (newest,) = (await service.list_entries(session, "long")).items
    assert newest.request_id == "req-60"


async def test_f38_the_job_forgets_once_however_often_it_runs(settings: Settings) -> None:
    engine = create_engine(settings, pooled=False)
    async with transaction(engine) as session:
        tenant = await make_tenant(session, "acme")
        await service.turn_on(session, "acme", PromptLogging(retention_days=1))
        await service.store(session, [entry(tenant.id), entry(tenant.id, 3 * 86_400)])
    worker = create_worker(settings)
    for _ in range(2):
        await asyncio.to_thread(worker.tasks[FORGET].run)
    await asyncio.to_thread(worker.close_runtime)
    assert worker.conf.beat_schedule[FORGET]["schedule"].total_seconds() == 300
    async with transaction(engine) as session:
        assert await rows(session) == 1
    await engine.dispose()


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "accounts", "promptlog"]) as running:
        yield running


async def test_the_admin_api_turns_it_on_lists_reads_and_turns_it_off(deployed: Deployment) -> None:
    client, path = deployed.client, "/api/v1/tenants/acme/prompt-log"
    operator, viewer = deployed.operator, deployed.viewer
    assert (await client.get(path, headers=viewer)).json()["log_prompts"] is False
    assert (await client.put(path, headers=viewer, json={})).status_code == 403
    wrong = await client.put(path, headers=operator, json={"retention_days": 31})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "retention_days")
    on = await client.put(path, headers=operator, json={"retention_days": 30, "templates": ["EMP-####"]})
    assert on.json()["templates"] == ["EMP-####"]
    tenant_id = (await client.get("/api/v1/tenants/acme", headers=viewer)).json()["id"]
    inside = {"authorization": f"Bearer {deployed.settings.internal_token.reveal()}"}
    body = encode(Delivery(entries=[entry(UUID(tenant_id)), entry(uuid4(), 1)]))
    for headers in ({}, operator, deployed.tenant_member):
        refused = await client.post("/internal/v1/logged-requests", content=body, headers=headers)
        assert refused.status_code == 401
    delivered = await client.post("/internal/v1/logged-requests", content=body, headers=inside)
    assert msgspec.msgpack.decode(delivered.content) == {"stored": 1}
    big = encode({"entries": [msgspec.to_builtins(entry(UUID(tenant_id), prompt="x" * (2 * MAX_TEXT + 1)))]})
    for junk in (b"", b"\xc1", encode({"entries": 5}), big):
        answer = await client.post("/internal/v1/logged-requests", content=junk, headers=inside)
        assert answer.status_code == 400
        assert "xxxx" not in answer.text
    listed = (await client.get(f"{path}/entries", headers=viewer)).json()
    assert "prompt 0" not in str(listed)
    number = listed["items"][0]["id"]
    assert (await client.post(f"{path}/entries/{number}/read", headers=viewer)).status_code == 403
    read = await client.post(f"{path}/entries/{number}/read", headers=operator)
    assert read.json()["prompt"] == "prompt 0"
    assert len((await client.get(f"{path}/reads", headers=viewer)).json()["items"]) == 1
    assert (await client.delete(path, headers=operator)).json()["log_prompts"] is False
    assert (await client.get(f"{path}/entries", headers=viewer)).json()["items"] == []
