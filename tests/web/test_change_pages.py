"""The forms that change a tenant's and a project's fields, over HTTP with the real services behind them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
import pytest_asyncio

from controlplane.db import transaction
from controlplane.tenants import projects, service
from controlplane.tenants.schemas import ProjectView, TenantPatch, TenantView
from tests.conftest import make_settings
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in
from tests.factories.rows import make_tenant
from tests.services import Databases

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = ("/tenants/acme/change", "/tenants/acme/projects/default/change")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    postgres: Databases, migrated_template: str, valkey: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    """One control plane for this file; a test changes only what it made itself."""
    url = postgres.create("changepages", template=migrated_template)
    home = tmp_path_factory.mktemp("home")
    async with deployment(make_settings(home, database_url=url, redis_url=valkey)) as running:
        yield running
    postgres.drop(url)


@pytest_asyncio.fixture(loop_scope="module")
async def deployed(shared: Deployment) -> Deployment:
    shared.client.cookies.clear()
    await shared.app.state.resources.redis.flushdb()
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def operator(deployed: Deployment) -> Deployment:
    await log_in(deployed, deployed.operator_email)
    return deployed


async def made(deployed: Deployment, **fields: Any) -> TenantView:
    async with transaction(deployed.app.state.resources.engine) as session:
        tenant = await make_tenant(session)
        return await service.change_tenant(session, tenant.slug, TenantPatch(**fields))


async def tenant_now(deployed: Deployment, slug: str) -> TenantView:
    async with transaction(deployed.app.state.resources.engine) as session:
        return await service.get_tenant(session, slug)


async def project_now(deployed: Deployment, tenant: str, slug: str) -> ProjectView:
    async with transaction(deployed.app.state.resources.engine) as session:
        return await projects.get_project(session, tenant, slug)


async def filled(deployed: Deployment, path: str) -> dict[str, Any]:
    """The form at `path` as a browser would send it untouched."""
    page = await deployed.client.get(path)
    assert page.status_code == 200, page.text
    form = page.text.split(f'action="{path}"', 1)[1].split("</form>", 1)[0]
    found: dict[str, Any] = {}
    for tag in re.findall(r"<input[^>]*>", form):
        name, value = (re.search(rf'{each}="([^"]*)"', tag) for each in (r"\bname", r"\bvalue"))
        assert name is not None and value is not None, tag
        before = found.get(name[1])
        found[name[1]] = value[1] if before is None else [*([before] if isinstance(before, str) else before), value[1]]
    for name, options in re.findall(r'<select[^>]*name="([^"]+)"[^>]*>(.*?)</select>', form, re.DOTALL):
        (found[name],) = re.findall(r'value="([^"]*)" selected', options)
    return found


async def send(deployed: Deployment, path: str, form: Mapping[str, Any]) -> httpx.Response:
    return await deployed.client.post(path, data=dict(form), follow_redirects=False)


def problem(answer: httpx.Response, field: str) -> str:
    """The sentence at `field` of a form that was shown again."""
    assert answer.status_code == 422, answer.text
    found = re.search(rf'id="error-(?:field-)?{field}">([^<]+)<', answer.text)
    assert found, answer.text
    return found.group(1)


async def test_every_field_of_a_tenant_is_changed_with_the_form(operator: Deployment) -> None:
    tenant = await made(operator, metadata={"cost-centre": "4711", "owner": "ada"})
    path = f"/tenants/{tenant.slug}/change"
    form = await filled(operator, path)
    assert form["metadata_key"] == ["cost-centre", "owner", "", ""]
    form |= {
        "name": " Blue <Ltd> ",
        "active": "inactive",
        "allowed_models": "small, big",
        "time_zone": "Europe/Berlin",
        "weight": "2.5",
        "floor_tokens_per_s": "100",
        "priority": "-3",
        "metadata_key": ["cost-centre", "", "region", ""],
        "metadata_value": ["4712", "", "a=b", ""],
    }
    answer = await send(operator, path, form)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/tenants/{tenant.slug}")
    now = await tenant_now(operator, tenant.slug)
    assert (now.name, now.active, now.allowed_models) == ("Blue <Ltd>", False, ["small", "big"])
    assert (now.time_zone, now.weight, now.floor_tokens_per_s, now.priority) == ("Europe/Berlin", 2.5, 100.0, -3)
    assert now.metadata == {"cost-centre": "4712", "region": "a=b"}
    page = (await operator.client.get(f"/tenants/{tenant.slug}")).text
    assert "Blue &lt;Ltd&gt;" in page
    assert f'href="{path}"' in page


async def test_a_form_sent_as_it_came_changes_nothing(operator: Deployment) -> None:
    """Not even what has no exact text in it: a model's name with a space, or no model at all."""
    for models in (["two words"], []):
        tenant = await made(operator, allowed_models=models, metadata={"a=b": " c "})
        path = f"/tenants/{tenant.slug}/change"
        assert (await send(operator, path, await filled(operator, path))).status_code == 303
        assert await tenant_now(operator, tenant.slug) == tenant


async def test_a_form_filled_in_before_somebody_elses_change_does_not_take_that_back(operator: Deployment) -> None:
    """Who renames a tenant must not let its keys in again that a colleague has just shut out."""
    tenant = await made(operator, metadata={"owner": "ada"})
    path = f"/tenants/{tenant.slug}/change"
    form = await filled(operator, path) | {"name": "Renamed"}
    async with transaction(operator.app.state.resources.engine) as session:
        await service.change_tenant(session, tenant.slug, TenantPatch(active=False, metadata={"owner": "bob"}))
    assert (await send(operator, path, form)).status_code == 303
    now = await tenant_now(operator, tenant.slug)
    assert (now.name, now.active, now.metadata) == ("Renamed", False, {"owner": "bob"})


async def test_two_who_change_the_same_field_are_told(operator: Deployment) -> None:
    tenant = await made(operator, weight=1.0, metadata={})
    path = f"/tenants/{tenant.slug}/change"
    form = await filled(operator, path) | {"weight": "3", "metadata_key": ["a", ""], "metadata_value": ["1", ""]}
    async with transaction(operator.app.state.resources.engine) as session:
        await service.change_tenant(session, tenant.slug, TenantPatch(weight=2.0, priority=7))
    answer = await send(operator, path, form)
    assert "2" in problem(answer, "weight")
    assert (await tenant_now(operator, tenant.slug)).weight == 2.0
    (seen,) = re.findall(r'name="seen" value="([^"]+)"', answer.text)
    assert re.search(r'name="priority"[^>]*value="7"', answer.text)
    again = form | {"seen": seen, "priority": "7"}
    assert (await send(operator, path, again)).status_code == 303
    now = await tenant_now(operator, tenant.slug)
    assert (now.weight, now.priority, now.metadata) == (3.0, 7, {"a": "1"})


async def test_large_numbers_are_shown_with_all_their_digits(operator: Deployment) -> None:
    tenant = await made(operator, weight=1.2345678, floor_tokens_per_s=1234567.0)
    form = await filled(operator, f"/tenants/{tenant.slug}/change")
    assert (form["weight"], form["floor_tokens_per_s"]) == ("1.2345678", "1234567")
    assert "1234567 tokens/s" in (await operator.client.get(f"/tenants/{tenant.slug}")).text


async def test_a_project_is_changed_with_its_form(operator: Deployment) -> None:
    tenant = await made(operator, metadata={})
    async with transaction(operator.app.state.resources.engine) as session:
        await projects.create_project(session, tenant.slug, slug="blue", name="Blue")
    path = f"/tenants/{tenant.slug}/projects/blue/change"
    assert f'href="{path}"' in (await operator.client.get(f"/tenants/{tenant.slug}/projects")).text
    form = await filled(operator, path)
    form |= {
        "name": "Bluer",
        "active": "inactive",
        "allowed_models": "small",
        "metadata_key": "k",
        "metadata_value": "v",
    }
    answer = await send(operator, path, form)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/tenants/{tenant.slug}/projects")
    now = await project_now(operator, tenant.slug, "blue")
    assert (now.name, now.active, now.allowed_models, now.metadata) == ("Bluer", False, ["small"], {"k": "v"})
    default = f"/tenants/{tenant.slug}/projects/default/change"
    form = await filled(operator, default)
    assert (await send(operator, default, form | {"name": "Main"})).status_code == 303
    assert (await project_now(operator, tenant.slug, "default")).name == "Main"
    answer = await send(operator, default, form | {"active": "inactive"})
    assert answer.status_code == 422
    assert "stays active" in answer.text


@pytest.mark.parametrize(
    ("changed", "field", "sentence"),
    [
        ({"name": " "}, "name", "1 to 200 printable"),
        ({"active": "perhaps"}, "active", "Choose active or inactive"),
        ({"time_zone": "Mars/Olympus"}, "time_zone", "not an IANA time zone"),
        ({"weight": "0"}, "weight", "between 0.001 and 1000"),
        ({"weight": "nan"}, "weight", "between 0.001 and 1000"),
        ({"weight": ""}, "weight", "missing"),
        ({"floor_tokens_per_s": "much"}, "floor_tokens_per_s", "must be a number"),
        ({"priority": "1.5"}, "priority", "whole number"),
        ({"priority": "101"}, "priority", "between -100 and 100"),
        ({"metadata_key": ["", "a"], "metadata_value": ["lost <key>", "b"]}, "metadata", "has no key"),
        ({"metadata_key": ["a", "a"], "metadata_value": ["1", "2"]}, "metadata", "there twice"),
        ({"metadata_key": [f"k{n}" for n in range(17)], "metadata_value": ["v"] * 17}, "metadata", "at most 16 pairs"),
        ({"metadata_key": "k" * 65, "metadata_value": "v"}, "metadata", "1 to 64 printable"),
    ],
)
async def test_a_refused_change_is_shown_again_as_it_was_filled_in(
    operator: Deployment, changed: dict[str, Any], field: str, sentence: str
) -> None:
    tenant = await made(operator, metadata={})
    path = f"/tenants/{tenant.slug}/change"
    answer = await send(operator, path, await filled(operator, path) | changed)
    assert sentence in problem(answer, field)
    assert 'aria-invalid="true"' in answer.text
    assert "lost <key>" not in answer.text
    for typed in changed.values():
        last = typed if isinstance(typed, str) else typed[-1]
        assert field == "active" or f'value="{last}"' in answer.text
    assert await tenant_now(operator, tenant.slug) == tenant


@pytest.mark.parametrize("path", PATHS)
async def test_only_operators_with_their_csrf_token_change(deployed: Deployment, path: str) -> None:
    stranger = await deployed.client.get(path, headers={"accept": "text/html"})
    assert (stranger.status_code, stranger.headers["location"].split("?")[0]) == (303, "/login")
    await log_in(deployed, deployed.operator_email)
    assert (await send(deployed, path, {"name": "Evil"})).status_code == 403
    deployed.client.cookies.clear()
    await log_in(deployed, deployed.viewer_email)
    page = await deployed.client.get(path)
    assert page.status_code == 200
    assert 'name="name"' not in page.text
    assert "/change" not in (await deployed.client.get("/tenants/acme")).text
    token = await csrf_of(deployed.client, "/tenants")
    assert (await send(deployed, path, {"_csrf_token": token, "name": "Evil"})).status_code == 403
    assert "Evil" not in (await deployed.client.get("/tenants/acme")).text


async def test_what_is_not_there_cannot_be_changed(operator: Deployment) -> None:
    for path in ("/tenants/nobody/change", "/tenants/acme/projects/nothing/change"):
        assert (await operator.client.get(path)).status_code == 404
        token = await csrf_of(operator.client, "/tenants")
        assert (await send(operator, path, {"_csrf_token": token, "name": "X"})).status_code == 404
