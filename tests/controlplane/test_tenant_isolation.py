"""No list of one tenant shows a row of another (F36): generated over every route of the admin API that takes a tenant.

A route counts when it lies below `/tenants/{slug}` or has a `tenant` filter, so new ones are covered by themselves.
What each could show of the other tenant must exist: a route that shows that one nothing of its own proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from litestar.params import QueryParameter
from litestar.routes import HTTPRoute
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.app import Application
from controlplane.db import transaction
from controlplane.ledger import service as ledger
from controlplane.settings import Settings
from controlplane.telemetry.intake import store
from controlplane.tenants import principals, projects
from controlplane.tenants.schemas import PrincipalKind, PrincipalRole, TenantPatch
from controlplane.tenants.service import change_tenant
from dataplane.protocol import GatewayWindow
from tests.controlplane.clients import Deployment, deployment
from tests.controlplane.telemetry.reports import counters, gateway_report, series, usage
from tests.factories.rows import make_key, make_tenant

MINE, THEIRS = "acme", "globex"
WORD = {MINE: "anvil", THEIRS: "goggles"}
"""Stands in every name of the tenant's rows."""


@dataclass(frozen=True)
class ListRoute:
    """A GET of the admin API that takes a tenant, and the query parameters it knows with those it needs."""

    template: str
    needs: frozenset[str]
    takes: frozenset[str]
    parameters: frozenset[str]
    """Of the path, beside the tenant's slug."""

    def path(self, tenant: str, ids: Mapping[str, str]) -> str:
        filled = self.template.replace("{slug}", tenant)
        for name in self.parameters:
            assert name in ids, f"say in `seeded` what stands for {{{name}}} in {self.template}"
            filled = filled.replace(f"{{{name}}}", ids[name])
        return filled

    def query(self, tenant: str, **more: str) -> dict[str, str]:
        now = datetime.now(UTC)
        span = {
            "since": (now - timedelta(hours=1)).isoformat(),
            "until": (now + timedelta(hours=1)).isoformat(),
        }
        wanted = {name: span[name] for name in self.needs}
        return wanted | ({"tenant": tenant} if "tenant" in self.takes else {}) | more


def routes_with_a_tenant(app: Application) -> Iterator[ListRoute]:
    for route in app.routes:
        if not isinstance(route, HTTPRoute) or not route.path_format.startswith("/api/v1/"):
            continue
        handler = next((each for each in route.route_handlers if "GET" in each.http_methods), None)
        if handler is None:
            continue
        query = {
            definition.query or name: parameter
            for name, parameter in handler.parsed_fn_signature.parameters.items()
            if isinstance(definition := parameter.kwarg_definition, QueryParameter)
        }
        if "tenant" in query or route.path_format.startswith("/api/v1/tenants/{slug}"):
            yield ListRoute(
                template=route.path_format,
                needs=frozenset(name for name, parameter in query.items() if not parameter.has_default),
                takes=frozenset(query),
                parameters=frozenset(route.path_parameters) - {"slug"},
            )


@dataclass
class Rows:
    """What stands for path parameters, and every text that only this tenant's rows hold."""

    ids: dict[str, str] = field(default_factory=dict)
    traces: set[str] = field(default_factory=set)


async def seeded(session: AsyncSession, tenant: str) -> Rows:
    """Two of everything a tenant can have, so that lists have a second page."""
    word = WORD[tenant]
    rows = Rows(ids={"project": f"{word}-1"}, traces={word})
    now = time.time()
    for number in range(2):
        project = await projects.create_project(session, tenant, slug=f"{word}-{number}", name=f"{word} {number}")
        owner = await principals.create_principal(
            session, tenant, kind=PrincipalKind.SERVICE_ACCOUNT, name=f"{word} bot {number}", role=PrincipalRole.MEMBER
        )
        key = await make_key(
            session, tenant, project=project.slug, principal_id=owner.id, metadata={"of": f"{word} {number}"}
        )
        rows.ids["principal_id"] = str(owner.id)
        rows.traces |= {str(project.id), str(owner.id), key.view.key_id}
        record = usage(f"{word}-attempt-{number}", tenant=tenant, key_id=key.view.key_id, finished_at=now - number)
        window = GatewayWindow(
            start=int(now) // 10 * 10 - 20 - 10 * number, series=[series(tenant, counters(), replica="r1")]
        )
        await store(session, [gateway_report([window], gateway=f"{word}-{number}")], now)
        assert await ledger.record(session, [record]) == [record]
    await change_tenant(session, tenant, TenantPatch(weight=2.0))  # a second change in the policy's history
    rows.traces.add(tenant)
    return rows


@dataclass(frozen=True)
class Two:
    """A control plane with two tenants' rows."""

    deployed: Deployment
    mine: Rows
    theirs: Rows

    async def ask(self, route: ListRoute, tenant: str, ids: Mapping[str, str], **more: str) -> tuple[int, str]:
        answer = await self.deployed.client.get(
            route.path(tenant, ids), params=route.query(tenant, **more), headers=self.deployed.viewer
        )
        return answer.status_code, answer.text


@pytest.fixture
async def two(settings: Settings) -> AsyncIterator[Two]:
    async with deployment(settings) as running:
        async with transaction(running.app.state.resources.engine) as session:
            await make_tenant(session, THEIRS)
            yield_mine, yield_theirs = await seeded(session, MINE), await seeded(session, THEIRS)
        yield Two(running, yield_mine, yield_theirs)


def seen(rows: Rows, text: str) -> set[str]:
    return {trace for trace in rows.traces if trace in text}


async def test_f36_no_list_of_a_tenant_holds_a_row_of_another(two: Two) -> None:
    walked = []
    for route in routes_with_a_tenant(two.deployed.app):
        walked.append(route.template)
        status, theirs = await two.ask(route, THEIRS, two.theirs.ids)
        assert status == 200, (route, theirs)
        assert seen(two.theirs, theirs), f"{route.template} shows nothing of {THEIRS}: let `seeded` make some"
        status, mine = await two.ask(route, MINE, two.mine.ids)
        assert status == 200, (route, mine)
        assert seen(two.mine, mine), route
        assert not seen(two.theirs, mine), route
    assert {"/api/v1/usage", "/api/v1/overview", "/api/v1/tenants/{slug}/keys"} <= set(walked)
    assert len(walked) >= 9


async def test_f36_another_tenants_cursor_opens_nothing(two: Two) -> None:
    walked = 0
    for route in routes_with_a_tenant(two.deployed.app):
        if "after" not in route.takes:
            continue
        status, first = await two.ask(route, THEIRS, two.theirs.ids, limit="1")
        assert status == 200, (route, first)
        cursor = decoded(first)["next"]
        assert cursor, f"{route.template} has no second page of {THEIRS}: let `seeded` make two"
        status, mine = await two.ask(route, MINE, two.mine.ids, after=str(cursor))
        assert status == 200, (route, mine)
        assert not seen(two.theirs, mine), route
        walked += 1
    assert walked >= 4


async def test_f36_what_belongs_to_another_tenant_is_not_found_below_ones_own(two: Two) -> None:
    walked = 0
    for route in routes_with_a_tenant(two.deployed.app):
        if route.parameters & two.theirs.ids.keys():
            status, answer = await two.ask(route, MINE, two.theirs.ids)
            assert status == 404, (route, answer)
            walked += 1
    assert walked >= 2


def decoded(text: str) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(text)
    return found
