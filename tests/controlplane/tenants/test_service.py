"""The tenants service on real Postgres."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.tenants import keys, service
from controlplane.tenants.schemas import PROBE_TENANT, TenantPatch
from tests.factories.rows import make_key, make_tenant


async def test_a_tenant_gets_its_own_cache_salt(session: AsyncSession) -> None:
    for slug in ("acme", "globex"):
        await make_tenant(session, slug)
    grants = [
        await service.load_key(session, (await make_key(session, slug)).view.key_id) for slug in ("acme", "globex")
    ]
    salts = {grant.cache_salt for grant in grants if grant}
    assert len(salts) == 2
    assert all(len(salt) >= 32 for salt in salts)


@pytest.mark.parametrize("slug", ["", "UPPER", "a b", "a_b", "x" * 41, "ä", "a\n", "a/b", "a'--"])
async def test_a_bad_slug_is_refused_by_name(session: AsyncSession, slug: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await service.create_tenant(session, slug=slug, name="Acme")
    assert caught.value.param == "slug"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", " "),
        ("name", "x" * 201),
        ("name", "a\x00b"),
        ("priority", 101),
        ("allowed_models", [""]),
        ("allowed_models", ["m"] * 201),
    ],
)
async def test_other_bad_fields_are_refused_by_name(session: AsyncSession, field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await service.create_tenant(session, **{"slug": "acme", "name": "Acme", field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


async def test_the_canaries_tenant_and_its_keys_are_theirs_alone(session: AsyncSession) -> None:
    with pytest.raises(ConflictError) as slug:
        await service.create_tenant(session, slug=PROBE_TENANT, name="Mine")
    await service.create_tenant(session, slug=PROBE_TENANT, name="Canaries", reserved=True)
    with pytest.raises(ConflictError) as made:
        await service.create_key(session, tenant_slug=PROBE_TENANT, name="mine")
    canary = await service.create_key(session, tenant_slug=PROBE_TENANT, name="canary", reserved=True)
    with pytest.raises(ConflictError) as rotated:
        await service.rotate_key(session, canary.view.key_id)
    assert [one.value.code for one in (slug, made, rotated)] == ["slug_reserved", "tenant_reserved", "tenant_reserved"]


async def test_a_slug_is_taken_once(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    with pytest.raises(ConflictError, match="acme exists already"):
        await make_tenant(session, "acme")
    assert (await service.get_tenant(session, "acme")).slug == "acme"


async def test_f10_a_repeated_creation_makes_one_tenant(session: AsyncSession) -> None:
    first = await service.create_tenant(session, slug="acme", name="Acme", idempotency_key="abc")
    again = await service.create_tenant(session, slug="acme", name="Acme", idempotency_key="abc")
    assert again == first
    with pytest.raises(ConflictError, match="already made the tenant acme"):
        await service.create_tenant(session, slug="other", name="Other", idempotency_key="abc")


async def test_f10_a_repeated_key_creation_makes_one_key_and_names_it(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    first = await service.create_key(session, tenant_slug="acme", name="ci", idempotency_key="abc")
    with pytest.raises(ConflictError, match=first.view.key_id):
        await service.create_key(session, tenant_slug="acme", name="ci", idempotency_key="abc")
    assert len((await service.list_keys(session, "acme")).items) == 1


async def test_f10_concurrent_repeats_make_one_tenant(committed_engine: AsyncEngine) -> None:
    async def create() -> str:
        async with transaction(committed_engine) as session:
            made = await service.create_tenant(session, slug="acme", name="Acme", idempotency_key="abc")
            return str(made.id)

    assert len(set(await asyncio.gather(*(create() for _ in range(8))))) == 1


async def test_patching_changes_what_is_named_and_nothing_else(session: AsyncSession) -> None:
    before = await make_tenant(session, "acme", allowed_models=["m1"], priority=3)
    after = await service.change_tenant(session, "acme", TenantPatch(name="New"))
    assert (after.name, after.allowed_models, after.priority, after.id) == ("New", ["m1"], 3, before.id)
    assert (await service.change_tenant(session, "acme", TenantPatch(allowed_models=None))).allowed_models is None
    assert (await service.change_tenant(session, "acme", TenantPatch())).name == "New"
    assert not (await service.set_tenant_active(session, "acme", False)).active
    with pytest.raises(NotFoundError):
        await service.set_tenant_active(session, "nobody", False)


async def test_paging_visits_every_tenant_once_oldest_first_even_while_new_ones_come(session: AsyncSession) -> None:
    made = [(await make_tenant(session)).slug for _ in range(7)]
    for age, slug in enumerate(reversed(made), start=1):
        await session.execute(
            text("UPDATE tenants SET created_at = now() - make_interval(hours => :age) WHERE slug = :slug"),
            {"age": age // 2 + 1, "slug": slug},
        )
    seen: list[str] = []
    after = None
    while True:
        page = await service.list_tenants(session, after=after, limit=3)
        seen += [tenant.slug for tenant in page.items]
        if page.next is None:
            break
        after = page.next
        if len(seen) == 3:
            made.append((await make_tenant(session, "late")).slug)
    assert sorted(seen) == sorted(made)
    assert seen[-1] == "late"
    ages = [(await service.get_tenant(session, slug)).created_at for slug in seen]
    assert ages == sorted(ages)


async def test_a_page_that_is_just_full_is_the_last(session: AsyncSession) -> None:
    for _ in range(3):
        await make_tenant(session)
    assert (await service.list_tenants(session, limit=3)).next is None


@pytest.mark.parametrize("cursor", ["x", "", "kqNhYmOjeHl6", "a" * 5000, "é"])
async def test_a_foreign_cursor_is_refused(session: AsyncSession, cursor: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await service.list_tenants(session, after=cursor)
    assert caught.value.param == "after"


async def test_a_list_page_costs_a_fixed_number_of_queries(session: AsyncSession, engine: AsyncEngine) -> None:
    await make_tenant(session, "acme")
    for _ in range(5):
        await make_key(session, "acme")
    statements: list[str] = []
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    await service.list_tenants(session)
    assert len(statements) == 1
    await service.list_keys(session, "acme")
    assert len(statements) == 3


async def test_the_secret_is_nowhere_in_the_database(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    created = await make_key(session, "acme")
    secret = created.plain.reveal().split("_")[2]
    row = (await session.execute(text("SELECT to_jsonb(k)::text FROM api_keys k"))).scalar_one()
    assert secret[:40] not in row
    assert created.view.hint.startswith("tg_")
    assert secret[:40] not in repr(created)


async def test_a_gateway_gets_all_it_needs_in_one_query(session: AsyncSession, engine: AsyncEngine) -> None:
    tenant = await make_tenant(session, "acme", priority=7)
    expires = datetime.now(UTC) + timedelta(hours=1)
    created = await make_key(session, "acme", expires_at=expires)
    statements: list[str] = []
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    grant = await service.load_key(session, created.view.key_id)
    assert len(statements) == 1
    assert grant is not None
    assert keys.verify(keys.parse(created.plain.reveal()), grant)
    assert (grant.tenant, grant.tenant_id, grant.priority) == ("acme", str(tenant.id), 7)
    assert grant.expires_at == pytest.approx(expires.timestamp(), abs=1e-3)
    assert not grant.revoked
    assert grant.tenant_active
    assert await service.load_key(session, "nosuchkey00") is None


@pytest.mark.parametrize(
    ("tenant_models", "key_models", "expected"),
    [
        (None, None, None),
        (["a", "b"], None, ("a", "b")),
        (None, ["b"], ("b",)),
        (["a", "b"], ["b", "c"], ("b",)),
        (["a"], ["c"], ()),
        ([], None, ()),
    ],
)
async def test_a_key_never_opens_more_models_than_its_tenant_has(
    session: AsyncSession, tenant_models: list[str] | None, key_models: list[str] | None, expected: object
) -> None:
    await make_tenant(session, "acme", allowed_models=tenant_models)
    created = await make_key(session, "acme", allowed_models=key_models)
    grant = await service.load_key(session, created.view.key_id)
    assert grant is not None
    assert grant.allowed_models == expected


async def test_f16_revoking_shows_at_once_and_revoking_again_keeps_the_first_time(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    created = await make_key(session, "acme")
    epoch = await service.policy_epoch(session)
    first = await service.revoke_key(session, created.view.key_id)
    assert first.revoked_at is not None
    assert await service.policy_epoch(session) == epoch + 1
    again = await service.revoke_key(session, created.view.key_id)
    assert again.revoked_at == first.revoked_at
    assert await service.policy_epoch(session) == epoch + 1
    grant = await service.load_key(session, created.view.key_id)
    assert grant is not None
    assert grant.revoked
    with pytest.raises(NotFoundError):
        await service.revoke_key(session, "nosuchkey00")


async def test_an_expiry_must_lie_ahead_and_name_its_zone(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    for wrong in (datetime.now(UTC) - timedelta(seconds=1), datetime.now() + timedelta(days=1)):
        with pytest.raises(InvalidRequestError) as caught:
            await make_key(session, "acme", expires_at=wrong)
        assert caught.value.param == "expires_at"


async def test_the_snapshot_read_holds_usable_keys_only_and_pages(session: AsyncSession) -> None:
    await make_tenant(session, "acme")
    await make_tenant(session, "asleep")
    usable = [(await make_key(session, "acme")).view.key_id for _ in range(3)]
    revoked = (await make_key(session, "acme")).view.key_id
    await service.revoke_key(session, revoked)
    await make_key(session, "asleep")
    await service.set_tenant_active(session, "asleep", False)
    first = await service.load_keys(session, limit=2)
    rest = await service.load_keys(session, after_id=first[-1].key_id, limit=2)
    assert [grant.key_id for grant in first + rest] == sorted(usable)
