"""Projects on real Postgres: made once, changed, found within their tenant only, and what they do to keys."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.tenants import projects, service
from controlplane.tenants.schemas import ProjectPatch, TenantPatch
from tests.factories.rows import make_key, make_tenant


async def test_a_tenant_begins_with_the_project_default(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    (only,) = (await projects.list_projects(session, "acme")).items
    assert (only.slug, only.tenant, only.active) == ("default", "acme", True)
    assert (await make_key(session, "acme")).view.project == "default"


async def test_projects_are_created_shown_listed_and_changed(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    made = await projects.create_project(
        session, "acme", slug="search", name="Search", allowed_models=["m"], metadata={"team": "core"}
    )
    assert await projects.get_project(session, "acme", "search") == made
    assert {each.slug for each in (await projects.list_projects(session, "acme")).items} == {"default", "search"}
    changed = await projects.change_project(session, "acme", "search", ProjectPatch(name="Find", metadata={"a": "b"}))
    assert (changed.name, changed.metadata, changed.allowed_models) == ("Find", {"a": "b"}, ["m"])
    assert (
        await projects.change_project(session, "acme", "search", ProjectPatch(allowed_models=None))
    ).allowed_models is None
    assert (await projects.change_project(session, "acme", "search", ProjectPatch())).name == "Find"


async def test_lists_of_projects_visit_each_once(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    made = {"default"}
    for number in range(5):
        made.add((await projects.create_project(session, "acme", slug=f"p{number}", name="P")).slug)
    seen, after = [], None
    for _ in range(3):
        page = await projects.list_projects(session, "acme", after=after, limit=2)
        seen += [each.slug for each in page.items]
        after = page.next
    assert (len(seen), set(seen), after) == (6, made, None)


async def test_f10_repeated_and_concurrent_creations_make_one_project(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        await make_tenant(session, "acme")

    async def create() -> str:
        async with transaction(committed_engine) as session:
            made = await projects.create_project(session, "acme", slug="search", name="S", idempotency_key="once")
            return str(made.id)

    assert len(set(await asyncio.gather(*(create() for _ in range(8))))) == 1
    async with transaction(committed_engine) as session:
        with pytest.raises(ConflictError, match="has a project search already") as taken:
            await projects.create_project(session, "acme", slug="search", name="S")
        assert taken.value.param == "slug"
        with pytest.raises(ConflictError, match="already made the project search"):
            await projects.create_project(session, "acme", slug="other", name="S", idempotency_key="once")


async def test_f36_a_project_answers_within_its_own_tenant_only(session: AsyncSession) -> None:
    for slug in ("acme", "globex"):
        await make_tenant(session, slug)
    await projects.create_project(session, "acme", slug="secret", name="S")
    for attempt in (
        projects.get_project(session, "globex", "secret"),
        projects.change_project(session, "globex", "secret", ProjectPatch(name="Mine")),
        make_key(session, "globex", project="secret"),
    ):
        with pytest.raises(NotFoundError) as missing:
            await attempt
        assert (missing.value.code, missing.value.param) == ("project_not_found", "project")
    assert (await projects.get_project(session, "acme", "secret")).name == "S"


async def test_default_stays_active_and_an_inactive_project_takes_no_new_keys(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    with pytest.raises(ConflictError) as refused:
        await projects.change_project(session, "acme", "default", ProjectPatch(active=False))
    assert (refused.value.code, refused.value.param) == ("default_project", "active")
    await projects.change_project(session, "acme", "default", ProjectPatch(active=True, name="Main"))
    await projects.create_project(session, "acme", slug="search", name="S")
    key = (await make_key(session, "acme", project="search")).view.key_id
    await projects.change_project(session, "acme", "search", ProjectPatch(active=False))
    grant = await service.load_key(session, key)
    assert grant is not None
    assert (grant.project, grant.project_active, grant.tenant_active) == ("search", False, True)
    assert key not in {each.key_id for each in await service.load_keys(session)}
    with pytest.raises(ConflictError) as inactive:
        await make_key(session, "acme", project="search")
    assert (inactive.value.code, inactive.value.param) == ("project_inactive", "project")


@pytest.mark.parametrize(
    ("tenant", "project", "key", "expected"),
    [
        (None, None, None, None),
        (["a", "b"], ["b", "c"], None, ("b",)),
        (["a", "b"], ["b"], ["a", "b"], ("b",)),
        (None, ["b"], ["c"], ()),
        (["a"], None, ["a"], ("a",)),
    ],
)
async def test_a_key_never_opens_more_models_than_its_project_nor_that_more_than_its_tenant(
    session: AsyncSession, tenant: list[str] | None, project: list[str] | None, key: list[str] | None, expected: object
) -> None:
    await make_tenant(session, "acme", allowed_models=tenant)
    await projects.create_project(session, "acme", slug="p", name="P", allowed_models=project)
    made = await make_key(session, "acme", project="p", allowed_models=key)
    grant = await service.load_key(session, made.view.key_id)
    assert grant is not None
    assert grant.allowed_models == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slug", "No Slug"),
        ("name", "a\nb"),
        ("allowed_models", [""]),
        ("metadata", {f"k{number}": "" for number in range(17)}),
        ("metadata", {"": "v"}),
        ("metadata", {"k" * 65: "v"}),
        ("metadata", {"k": "v" * 513}),
        ("metadata", {"k": "a\x1bb"}),
    ],
)
async def test_bad_fields_are_refused_by_name(session: AsyncSession, field: str, value: object) -> None:
    await make_tenant(session, "acme")
    with pytest.raises(InvalidRequestError) as caught:
        await projects.create_project(session, "acme", **{"slug": "p", "name": "P", field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


async def test_a_tenant_has_time_zone_weight_floor_and_metadata(session: AsyncSession) -> None:
    full = {f"k{number}" * 16: "v" * 512 for number in range(16)}
    made = await make_tenant(
        session, "acme", time_zone="Asia/Kathmandu", weight=3, floor_tokens_per_s=50, metadata=full
    )
    assert (made.time_zone, made.weight, made.floor_tokens_per_s, made.metadata) == ("Asia/Kathmandu", 3.0, 50.0, full)
    plain = await make_tenant(session, "plain")
    assert (plain.time_zone, plain.weight, plain.floor_tokens_per_s, plain.metadata) == ("UTC", 1.0, 0.0, {})
    changed = await service.change_tenant(session, "acme", TenantPatch(weight=0.5, metadata={}))
    assert (changed.time_zone, changed.weight, changed.metadata) == ("Asia/Kathmandu", 0.5, {})
    kept = (await session.execute(text("SELECT metadata::text FROM tenants WHERE slug = 'acme'"))).scalar_one()
    assert kept == "{}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("time_zone", zone)
            for zone in (
                "Mars/Base",
                "",
                "../UTC",
                "America",
                "Europe/Berlin\n",
                "/etc/localtime",
                "localtime",
                "right/UTC",
            )
        ],
        *[("weight", weight) for weight in (0.0, -1.0, 1e-320, 0.0009, 1000.1, float("nan"), float("inf"))],
        *[("floor_tokens_per_s", floor) for floor in (-0.1, 1.1e9, 1e308, float("inf"), float("nan"))],
        ("metadata", {"k": "v" * 513}),
    ],
)
async def test_a_tenants_bad_fields_are_refused_by_name_on_creation_and_on_change(
    session: AsyncSession, field: str, value: object
) -> None:
    await make_tenant(session, "acme")
    with pytest.raises(InvalidRequestError) as creating:
        await service.create_tenant(session, **{"slug": "other", "name": "O", field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as changing:
        await service.change_tenant(session, "acme", TenantPatch(**{field: value}))  # type: ignore[arg-type]
    assert creating.value.param == changing.value.param == field
