"""Objectives: which of them holds, how they are stored, and their admin API."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError
from controlplane.settings import Settings
from controlplane.slo import service
from controlplane.slo.schemas import Slo, SloPatch, SloSpec, slo_for
from tests.controlplane.clients import Deployment, deployment
from tests.factories.rows import make_tenant

NOBODY = str(uuid4())
ANY = Slo(
    slo_id="any",
    tenant_id=None,
    pool="",
    service_class="",
    ttft_ms=500,
    ttft_share=0.95,
    tpot_ms=None,
    tpot_share=None,
    availability=None,
    window_days=30,
)


def test_the_most_specific_objectives_hold_the_tenants_own_first() -> None:
    everything = [
        replace(ANY, slo_id=f"{tenant}/{pool}/{name}", tenant_id=tenant, pool=pool, service_class=name)
        for tenant, pool, name in itertools.product((None, "t"), ("", "gpu"), ("", "fast"))
    ]

    def found(slos: list[Slo], tenant: str = "t", pool: str = "gpu", name: str = "fast") -> str | None:
        slo = slo_for(slos, tenant_id=tenant, pool=pool, service_class=name)
        return slo.slo_id if slo else None

    order = []
    left = list(everything)
    while best := found(left):
        order.append(best)
        left = [slo for slo in left if slo.slo_id != best]
    assert order == ["t/gpu/fast", "t/gpu/", "t//fast", "t//", "None/gpu/fast", "None/gpu/", "None//fast", "None//"]
    assert found(everything, tenant="other") == "None/gpu/fast"
    assert found(everything, pool="cpu", name="slow") == "t//"
    assert found([each for each in everything if each.pool], pool="cpu") is None


async def test_objectives_that_hold_are_loaded_as_they_were_made(session: AsyncSession) -> None:
    tenant = await make_tenant(session)
    own = await service.create_slo(
        session,
        SloSpec(tenant=tenant.slug, pool="gpu", service_class="fast", tpot_ms=12.5, tpot_share=0.99, window_days=7),
    )
    everyone = await service.create_slo(session, SloSpec(availability=0.999))
    sleeping = await service.create_slo(session, SloSpec(pool="cpu", availability=0.9, enabled=False))
    loaded = {slo.slo_id: slo for slo in await service.load_slos(session)}
    assert set(loaded) == {str(own.id), str(everyone.id)}
    mine = loaded[str(own.id)]
    assert (mine.tenant_id, mine.tpot_ms, mine.tpot_share, mine.window_days) == (str(tenant.id), 12.5, 0.99, 7)
    await service.change_slo(session, sleeping.id, SloPatch(enabled=True))
    assert len(await service.load_slos(session)) == 3


async def test_tenant_pool_and_class_have_one_set_of_objectives_all_included(session: AsyncSession) -> None:
    first = await service.create_slo(session, SloSpec(availability=0.99), idempotency_key="once")
    assert await service.create_slo(session, SloSpec(availability=0.99), idempotency_key="once") == first
    with pytest.raises(ConflictError, match="already"):
        await service.create_slo(session, SloSpec(availability=0.9))
    with pytest.raises(ConflictError, match="already made"):
        await service.create_slo(session, SloSpec(pool="x", availability=0.9), idempotency_key="once")


@pytest.mark.parametrize(
    "change", ["ttft_share = NULL", "ttft_ms = 0", "ttft_share = 1", "window_days = 91", "ttft_ms = NULL"]
)
async def test_the_database_itself_refuses_what_no_objective_can_be(session: AsyncSession, change: str) -> None:
    await service.create_slo(session, SloSpec(ttft_ms=500, ttft_share=0.95))
    with pytest.raises(IntegrityError):
        await session.execute(text(f"UPDATE slos SET {change}"))


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "slo", "accounts"]) as running:
        running.client.headers.update(running.operator)
        yield running


def body(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_objectives_are_made_shown_listed_changed_and_removed(deployed: Deployment) -> None:
    api = deployed.client
    spec = {"tenant": "acme", "class": "interactive", "ttft_ms": 500, "ttft_share": 0.95}
    made = body(await api.post("/api/v1/slos", json=spec), 201)
    assert (made["tenant"], made["pool"], made["class"], made["window_days"]) == ("acme", None, "interactive", 30)
    path = f"/api/v1/slos/{made['id']}"
    assert body(await api.get(path)) == made
    changed = body(await api.patch(path, json={"ttft_ms": None, "ttft_share": None, "availability": 0.999}))
    assert (changed["ttft_ms"], changed["availability"]) == (None, 0.999)
    body(await api.post("/api/v1/slos", json={"availability": 0.9}), 201)
    assert len(body(await api.get("/api/v1/slos"))["items"]) == 2
    assert body(await api.delete(path)) == changed
    assert body(await api.get(path), 404)["error"]["code"] == "slo_not_found"


async def test_f36_a_tenants_list_shows_its_own_alone(deployed: Deployment) -> None:
    api = deployed.client
    body(await api.post("/api/v1/tenants", json={"slug": "globex", "name": "Globex"}), 201)
    for tenant in ("acme", "globex", None):
        body(await api.post("/api/v1/slos", json={"tenant": tenant, "availability": 0.9}), 201)
    listed = body(await api.get("/api/v1/slos", params={"tenant": "acme"}))["items"]
    assert [row["tenant"] for row in listed] == ["acme"]


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "code", "param"),
    [
        ("POST", "/slos", {}, 400, "invalid_request", "ttft_ms"),
        ("POST", "/slos", {"ttft_ms": 500}, 400, "invalid_request", "ttft_share"),
        ("POST", "/slos", {"tpot_share": 0.9}, 400, "invalid_request", "tpot_ms"),
        ("POST", "/slos", {"availability": 1}, 400, "invalid_request", "availability"),
        ("POST", "/slos", {"availability": 0}, 400, "invalid_request", "availability"),
        ("POST", "/slos", {"availability": 0.9, "window_days": 91}, 400, "invalid_request", "window_days"),
        ("POST", "/slos", {"availability": 0.9, "class": "Not One"}, 400, "invalid_request", "class"),
        ("POST", "/slos", {"availability": 0.9, "pool": " "}, 400, "invalid_request", "pool"),
        ("POST", "/slos", {"availability": 0.9, "tenant": "nobody"}, 404, "tenant_not_found", "slug"),
        ("GET", "/slos?after=junk", None, 400, "invalid_request", "after"),
        ("PATCH", f"/slos/{NOBODY}", {"enabled": False}, 404, "slo_not_found", "slo_id"),
        ("DELETE", f"/slos/{NOBODY}", None, 404, "slo_not_found", "slo_id"),
    ],
)
async def test_a_refusal_names_what_is_wrong(
    deployed: Deployment, method: str, path: str, json: object, status: int, code: str, param: str
) -> None:
    error = body(await deployed.client.request(method, f"/api/v1{path}", json=json), status)["error"]
    assert (error["code"], error["param"]) == (code, param)


async def test_f10_objectives_are_bounded_and_a_repeat_is_none_more(
    session: AsyncSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_SLOS", 1)
    spec = SloSpec(availability=0.99)
    made = await service.create_slo(session, spec, idempotency_key="once")
    assert await service.create_slo(session, spec, idempotency_key="once") == made
    with pytest.raises(ConflictError, match="remove some"):
        await service.create_slo(session, SloSpec(pool="gpu", availability=0.99), idempotency_key="another")
