"""No list of one tenant shows a row of another (F36): generated over every route of the admin API that answers rows.

A route counts when it lies below `/tenants/{slug}`, has a `tenant` filter or names one tenant's row in its path, so new
ones are covered by themselves; what shows no tenant's rows is listed in `WHOLE`. What each could show of the other
tenant must exist: a route that shows that one nothing of its own proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
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
from controlplane.policy import service as policy
from controlplane.promptlog import service as promptlog
from controlplane.quotas import request_service
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import GrantSpec, QuotaRequestSpec, QuotaSpec
from controlplane.settings import Settings
from controlplane.slo.schemas import SloSpec
from controlplane.slo.service import create_slo
from controlplane.telemetry.intake import store
from controlplane.tenants import principals, projects
from controlplane.tenants import service as tenants
from controlplane.tenants.schemas import PrincipalKind, PrincipalRole, PromptLogging, TenantPatch
from controlplane.tenants.service import change_tenant
from dataplane.protocol import GatewayWindow
from tests.controlplane.clients import Deployment, deployment
from tests.controlplane.promptlog.test_service import entry as logged_entry
from tests.controlplane.telemetry.reports import counters, gateway_report, series, usage
from tests.factories.rows import make_key, make_tenant

MINE, THEIRS = "acme", "globex"
WORD = {MINE: "anvil", THEIRS: "goggles"}
"""Stands in every name of the tenant's rows."""
SLUG = "/api/v1/tenants/{slug}"
WHOLE = {
    "/api/v1/api-tokens",
    "/api/v1/canaries",
    "/api/v1/me",
    "/api/v1/policy",
    "/api/v1/pools",
    "/api/v1/prices",
    "/api/v1/prices/{price_id}",
    "/api/v1/replicas",
    "/api/v1/tenants",
    "/api/v1/users",
}
"""Routes of the deployment as a whole: rows of no tenant, or of all for operators."""


@dataclass(frozen=True)
class ListRoute:
    """A GET of the admin API, and the query parameters it knows with those it needs."""

    template: str
    needs: frozenset[str]
    takes: frozenset[str]
    parameters: frozenset[str]
    """Of the path, beside the tenant's slug."""

    @property
    def of_tenant(self) -> bool:
        """Whether the request itself names the tenant."""
        return "tenant" in self.takes or self.template.startswith(SLUG)

    def path(self, tenant: str, rows: Rows) -> str:
        filled = self.template.replace("{slug}", tenant)
        known = {"month": f"{datetime.now(UTC):%Y-%m}"} | rows.ids
        for name in self.parameters:
            assert name in known, f"say in `seeded` what stands for {{{name}}} in {self.template}"
            filled = filled.replace(f"{{{name}}}", known[name])
        return filled

    def query(self, tenant: str, **more: str) -> dict[str, str]:
        now = datetime.now(UTC)
        span = {
            "since": (now - timedelta(hours=1)).isoformat(),
            "until": (now + timedelta(hours=1)).isoformat(),
        }
        wanted = {name: span[name] for name in self.needs}
        return wanted | ({"tenant": tenant} if "tenant" in self.takes else {}) | more


def reading_routes(app: Application) -> Iterator[ListRoute]:
    """Every GET of the admin API."""
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
        yield ListRoute(
            template=route.path_format,
            needs=frozenset(name for name, parameter in query.items() if not parameter.has_default),
            takes=frozenset(query),
            parameters=frozenset(route.path_parameters) - {"slug"},
        )


def routes_of_tenants(app: Application) -> list[ListRoute]:
    """Those that show one tenant's rows."""
    return [
        route
        for route in reading_routes(app)
        if route.template not in WHOLE and not route.template.startswith("/api/v1/openapi.json")
    ]


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
        rows.ids |= {"principal_id": str(owner.id), "key_id": key.view.key_id}
        rows.traces |= {str(project.id), str(owner.id), key.view.key_id}
        record = usage(f"{word}-attempt-{number}", tenant=tenant, key_id=key.view.key_id, finished_at=now - number)
        window = GatewayWindow(
            start=int(now) // 10 * 10 - 20 - 10 * number, series=[series(tenant, counters(), replica="r1")]
        )
        await store(session, [gateway_report([window], gateway=f"{word}-{number}")], now)
        assert (await ledger.record(session, [record])).stored == [record]
        rows.traces |= await _logged(session, tenant, f"{word}-logged-{number}")
    await seed_quotas(session, tenant, rows)
    await change_tenant(session, tenant, TenantPatch(weight=2.0))  # a second change in the policy's history
    await session.flush()
    rows.ids["change_id"] = str((await policy.list_changes(session, tenant=tenant)).items[0].id)
    rows.traces.add(tenant)
    return rows


async def seed_quotas(session: AsyncSession, tenant: str, rows: Rows) -> None:
    """Two limits, two raises of one of them, two requests for more and two sets of objectives."""
    for kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.TOKENS_PER_DAY):
        quota = await quotas.create_quota(session, tenant, QuotaSpec(kind=kind, hard=1000, model=f"{WORD[tenant]}-m"))
        rows.ids["quota_id"] = str(quota.id)
        rows.traces.add(str(quota.id))
    for amount in (1, 2):
        text = f"{WORD[tenant]} wants {amount}"
        grant = GrantSpec(amount=amount, expires_at=datetime.now(UTC) + timedelta(hours=1), reason=text)
        rows.traces.add(str((await quotas.grant(session, quota.id, grant, by="ada")).id))
        more = QuotaRequestSpec(amount=amount, reason=text, quota_id=quota.id)
        asked = await request_service.ask(session, tenant, more, by="ada")
        rows.ids["request_id"] = str(asked.id)
        slo = await create_slo(session, SloSpec(tenant=tenant, pool=f"{WORD[tenant]}-{amount}", availability=0.99))
        rows.ids["slo_id"] = str(slo.id)
        rows.traces |= {str(asked.id), str(slo.id)}


async def _logged(session: AsyncSession, tenant: str, request_id: str) -> set[str]:
    """A request that the tenant had kept and somebody read."""
    await promptlog.turn_on(session, tenant, PromptLogging())
    tenant_id = (await tenants.get_tenant(session, tenant)).id
    await promptlog.store(session, [logged_entry(tenant_id, request_id=request_id)])
    newest = (await promptlog.list_entries(session, tenant, limit=1)).items[0]
    await promptlog.read_entry(session, tenant, newest.id, reader="op")
    return {request_id}


@dataclass(frozen=True)
class Two:
    """A control plane with two tenants' rows."""

    deployed: Deployment
    mine: Rows
    theirs: Rows

    async def ask(self, route: ListRoute, tenant: str, rows: Rows, **more: str) -> tuple[int, str]:
        answer = await self.deployed.client.get(
            route.path(tenant, rows), params=route.query(tenant, **more), headers=self.deployed.viewer
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
    for route in routes_of_tenants(two.deployed.app):
        walked.append(route.template)
        status, theirs = await two.ask(route, THEIRS, two.theirs)
        assert status == 200, (route, theirs)
        assert seen(two.theirs, theirs), f"{route.template} shows nothing of {THEIRS}: let `seeded` make some"
        status, mine = await two.ask(route, MINE, two.mine)
        assert status == 200, (route, mine)
        assert seen(two.mine, mine), route
        assert not seen(two.theirs, mine), route
    assert {"/api/v1/usage", "/api/v1/overview", "/api/v1/tenants/{slug}/keys"} <= set(walked)
    assert len(walked) >= 15


async def test_f36_another_tenants_cursor_opens_nothing(two: Two) -> None:
    walked = 0
    for route in routes_of_tenants(two.deployed.app):
        if "after" not in route.takes:
            continue
        status, first = await two.ask(route, THEIRS, two.theirs, limit="1")
        assert status == 200, (route, first)
        cursor = decoded(first)["next"]
        assert cursor, f"{route.template} has no second page of {THEIRS}: let `seeded` make two"
        status, mine = await two.ask(route, MINE, two.mine, after=str(cursor))
        assert status == 200, (route, mine)
        assert not seen(two.theirs, mine), route
        walked += 1
    assert walked >= 4


async def test_f36_what_belongs_to_another_tenant_is_not_found_below_ones_own(two: Two) -> None:
    walked = 0
    for route in routes_of_tenants(two.deployed.app):
        if route.of_tenant and route.parameters & two.theirs.ids.keys():
            status, answer = await two.ask(route, MINE, two.theirs)
            assert status == 404, (route, answer)
            walked += 1
    assert walked >= 2


def decoded(text: str) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(text)
    return found
