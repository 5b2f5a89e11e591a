"""The policy's history on a real database: who, what, before and after, and taking changes back (F17)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import acting_as, transaction
from controlplane.errors import ConflictError, NotFoundError
from controlplane.policy import service
from controlplane.policy.views import ChangeView, PolicyObject
from controlplane.promptlog import service as prompt_log
from controlplane.quotas import price_service, request_service
from controlplane.quotas import service as quotas
from controlplane.quotas.schemas import Away, QuotaKind
from controlplane.quotas.views import GrantSpec, PriceSpec, QuotaPatch, QuotaRequestSpec, QuotaSpec
from controlplane.slo import service as slos
from controlplane.slo.schemas import SloPatch, SloSpec
from controlplane.tenants import projects
from controlplane.tenants.schemas import PROBE_TENANT, PromptLogging, TenantPatch, TenantView
from controlplane.tenants.service import change_tenant, create_tenant, get_tenant, policy_epoch
from tests.factories.rows import make_tenant

DAY, RPM = QuotaKind.TOKENS_PER_DAY, QuotaKind.REQUESTS_PER_MINUTE
PRICE = PriceSpec(uncached_input=20, cached_input=5, output=80)


@pytest.fixture
async def acme(session: AsyncSession) -> AsyncIterator[TenantView]:
    await acting_as(session, "ada")
    yield await make_tenant(session)


async def last(session: AsyncSession) -> ChangeView:
    return (await service.list_changes(session, limit=1)).items[0]


def later(**span: float) -> datetime:
    return datetime.now(UTC) + timedelta(**span)


async def test_f17_a_change_is_kept_with_who_what_before_after_and_epoch(
    session: AsyncSession, acme: TenantView
) -> None:
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    made = await last(session)
    assert (made.who, made.object, made.row_id, made.tenant) == ("ada", PolicyObject.QUOTAS, str(quota.id), acme.slug)
    assert made.before is None
    assert made.after is not None
    assert (made.after["hard"], made.after["kind"]) == (100, "tokens_per_day")
    assert made.epoch == await policy_epoch(session)
    await acting_as(session, "bob")
    await quotas.change_quota(session, quota.id, QuotaPatch(hard=200, away=Away.OPEN))
    changed = await last(session)
    assert changed.who == "bob"
    assert changed.before is not None
    assert changed.after is not None
    assert (changed.before["hard"], changed.after["hard"], changed.after["away"]) == (100, 200, "open")
    assert changed.epoch == made.epoch + 1


async def test_the_history_holds_no_secret_and_no_change_that_changed_nothing(
    session: AsyncSession, acme: TenantView
) -> None:
    await change_tenant(session, acme.slug, TenantPatch(weight=3.0))
    changed = await last(session)
    assert changed.object is PolicyObject.TENANTS
    for row in (changed.before, changed.after):
        assert row is not None
        assert not {"cache_salt", "idempotency_key"} & set(row)
    await change_tenant(session, acme.slug, TenantPatch(weight=3.0))
    assert (await last(session)).id == changed.id


async def test_f17_a_limit_of_a_project_that_is_gone_is_not_put_on_another_of_its_name(
    session: AsyncSession, acme: TenantView
) -> None:
    await projects.create_project(session, acme.slug, slug="blue", name="Blue")
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100, project="blue"))
    await quotas.delete_quota(session, quota.id)
    removed = await last(session)
    await session.execute(text("DELETE FROM projects WHERE slug = 'blue'"))
    await projects.create_project(session, acme.slug, slug="blue", name="Another")
    with pytest.raises(ConflictError, match="its project is gone"):
        await service.roll_back(session, removed.id)
    assert (await quotas.list_quotas(session, acme.slug)).items == []


async def test_f17_what_was_of_a_tenant_that_is_gone_is_not_put_on_another_of_its_name(
    session: AsyncSession, acme: TenantView
) -> None:
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    slo = await slos.create_slo(session, SloSpec(tenant=acme.slug, availability=0.99))
    await quotas.delete_quota(session, quota.id)
    limit_gone = await last(session)
    await slos.delete_slo(session, slo.id)
    promise_gone = await last(session)
    await session.execute(text("DELETE FROM tenants WHERE id = :id"), {"id": acme.id})
    await create_tenant(session, slug=acme.slug, name="Another")
    for removed in (limit_gone, promise_gone):
        with pytest.raises(ConflictError, match="its tenant is gone"):
            await service.roll_back(session, removed.id)
    assert (await slos.list_slos(session)).items == []


async def test_a_prompt_log_is_not_turned_on_or_off_by_a_roll_back(session: AsyncSession, acme: TenantView) -> None:
    await prompt_log.turn_on(session, acme.slug, PromptLogging())
    with pytest.raises(ConflictError, match="prompt log"):
        await service.roll_back(session, (await last(session)).id)
    await prompt_log.turn_off(session, acme.slug)
    with pytest.raises(ConflictError, match="prompt log"):
        await service.roll_back(session, (await last(session)).id)
    assert not (await prompt_log.show(session, acme.slug)).log_prompts


async def test_limits_of_canaries_count_in_the_epoch_and_fill_no_history(session: AsyncSession) -> None:
    await create_tenant(session, slug=PROBE_TENANT, name="Canaries", reserved=True)
    made, before = await last(session), await policy_epoch(session)
    assert made.tenant == PROBE_TENANT
    quota = await quotas.create_quota(session, PROBE_TENANT, QuotaSpec(kind=DAY, hard=100))
    await quotas.grant(session, quota.id, GrantSpec(amount=5, expires_at=later(hours=1), reason="x"), by="ada")
    await quotas.change_quota(session, quota.id, QuotaPatch(hard=200))
    await quotas.delete_quota(session, quota.id)
    assert await policy_epoch(session) >= before + 4
    assert (await last(session)).id == made.id
    await change_tenant(session, PROBE_TENANT, TenantPatch(active=False))
    assert (await last(session)).id > made.id


async def test_a_change_straight_in_the_database_names_the_role_that_made_it(
    session: AsyncSession, acme: TenantView
) -> None:
    await acting_as(session, "")
    await session.execute(text("UPDATE tenants SET priority = 5 WHERE slug = :slug"), {"slug": acme.slug})
    role = await session.scalar(text("SELECT session_user::text"))
    assert (await last(session)).who == role


async def test_f17_a_limits_change_creation_and_removal_are_taken_back(session: AsyncSession, acme: TenantView) -> None:
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100, soft=50))
    await quotas.change_quota(session, quota.id, QuotaPatch(hard=200, soft=None, away=Away.LOCAL, local=5))
    change = await last(session)
    restored = await service.roll_back(session, change.id)
    assert restored.restores == change.id
    now = await quotas.get_quota(session, quota.id)
    assert (now.hard, now.soft, now.away, now.local) == (100, 50, Away.CLOSED, 0)
    await service.roll_back(session, restored.id)  # a way back is a change like any other
    assert (await quotas.get_quota(session, quota.id)).hard == 200
    grant = await quotas.grant(session, quota.id, GrantSpec(amount=7, expires_at=later(hours=1), reason="x"), by="ada")
    await quotas.delete_quota(session, quota.id)
    both = (await service.list_changes(session, limit=2)).items
    gone = {one.object: one for one in both}
    await service.roll_back(session, gone[PolicyObject.QUOTAS].id)
    await service.roll_back(session, gone[PolicyObject.GRANTS].id)
    again = await quotas.get_quota(session, quota.id)
    assert (again.hard, again.raised, again.kind) == (200, 7, DAY)
    assert (await quotas.list_grants(session, quota.id)).items[0].id == grant.id
    other = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=RPM, hard=1))
    await service.roll_back(session, (await last(session)).id)
    with pytest.raises(NotFoundError):
        await quotas.get_quota(session, other.id)


async def test_f17_a_row_that_has_changed_since_is_refused_and_left_alone(
    session: AsyncSession, acme: TenantView
) -> None:
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=1))
    made = await last(session)
    await quotas.change_quota(session, quota.id, QuotaPatch(hard=2))
    second = await last(session)
    await quotas.change_quota(session, quota.id, QuotaPatch(hard=3))
    third = await last(session)
    for early in (made, second):
        with pytest.raises(ConflictError, match=f"change {early.id + 1} ") as refused:
            await service.roll_back(session, early.id)
        assert refused.value.code == "changed_since"
    assert (await quotas.get_quota(session, quota.id)).hard == 3
    await service.roll_back(session, third.id)
    with pytest.raises(ConflictError):
        await service.roll_back(session, third.id)
    with pytest.raises(NotFoundError):
        await service.roll_back(session, 10**9)
    assert (await quotas.get_quota(session, quota.id)).hard == 2


async def test_f17_a_raise_is_ended_and_one_ended_too_early_is_given_again(
    session: AsyncSession, acme: TenantView
) -> None:
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    raised = await quotas.grant(session, quota.id, GrantSpec(amount=7, expires_at=later(hours=1), reason="x"), by="ada")
    await service.roll_back(session, (await last(session)).id)
    assert (await quotas.get_quota(session, quota.id)).raised == 0
    await service.roll_back(session, (await last(session)).id)
    assert (await quotas.get_quota(session, quota.id)).raised == 7
    kept = (await quotas.list_grants(session, quota.id)).items
    assert [(one.id, one.expires_at) for one in kept] == [(raised.id, raised.expires_at)]


async def test_f17_a_price_in_force_is_followed_by_the_one_before_it_and_a_planned_one_taken_back(
    session: AsyncSession,
) -> None:
    await price_service.set_price(session, PRICE, by="ada")
    first = await last(session)
    with pytest.raises(ConflictError) as refused:
        await service.roll_back(session, first.id)
    assert refused.value.code == "not_reversible"
    await price_service.set_price(session, PriceSpec(uncached_input=99, cached_input=99, output=99), by="ada")
    wrong = await last(session)
    restored = await service.roll_back(session, wrong.id)
    assert restored.restores == wrong.id
    prices = (await price_service.list_prices(session)).items
    assert [(one.uncached_input, one.valid_until is None) for one in prices] == [(20, True), (99, False), (20, False)]
    await price_service.set_price(
        session, PriceSpec(uncached_input=7, cached_input=7, output=7, valid_from=later(days=1)), by="ada"
    )
    await service.roll_back(session, (await last(session)).id)
    assert len((await price_service.list_prices(session)).items) == 3


async def test_f17_objectives_and_a_tenants_fields_are_taken_back(session: AsyncSession, acme: TenantView) -> None:
    slo = await slos.create_slo(session, SloSpec(tenant=acme.slug, ttft_ms=500, ttft_share=0.95))
    await slos.change_slo(session, slo.id, SloPatch(ttft_ms=900, enabled=False))
    await service.roll_back(session, (await last(session)).id)
    now = await slos.get_slo(session, slo.id)
    assert (now.ttft_ms, now.enabled, now.ttft_share) == (500, True, 0.95)
    await slos.delete_slo(session, slo.id)
    await service.roll_back(session, (await last(session)).id)
    assert (await slos.get_slo(session, slo.id)).ttft_ms == 500
    patch = TenantPatch(weight=9.0, time_zone="Asia/Tokyo", metadata={"a": "b"}, allowed_models=["m"], active=False)
    await change_tenant(session, acme.slug, patch)
    await service.roll_back(session, (await last(session)).id)
    assert await get_tenant(session, acme.slug) == acme
    made = (await service.list_changes(session, tenant=acme.slug, object_=PolicyObject.TENANTS)).items[-1]
    assert made.before is None
    await session.execute(text("DELETE FROM policy_changes WHERE id > :id"), {"id": made.id})
    with pytest.raises(ConflictError, match="deactivate"):
        await service.roll_back(session, made.id)


async def test_what_cannot_come_again_is_refused_and_changes_nothing(session: AsyncSession, acme: TenantView) -> None:
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=1))
    await quotas.delete_quota(session, quota.id)
    gone = await last(session)
    twin = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=5))
    before = await last(session)
    with pytest.raises(ConflictError) as refused:
        await service.roll_back(session, gone.id)
    assert refused.value.code == "not_reversible"
    assert (await last(session)).id == before.id
    assert (await quotas.get_quota(session, twin.id)).hard == 5
    await session.execute(text("DELETE FROM tenants WHERE slug = :slug"), {"slug": acme.slug})
    removed = [one for one in (await service.list_changes(session)).items if one.after is None]
    with pytest.raises(ConflictError):
        await service.roll_back(session, next(one.id for one in removed if one.row_id == str(twin.id)))


async def test_an_approved_request_is_taken_back_like_any_change(session: AsyncSession, acme: TenantView) -> None:
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    asked = await request_service.ask(session, acme.slug, QuotaRequestSpec(amount=50, reason="x", kind=DAY), by="k")
    await request_service.approve(session, asked.id, by="ada")
    assert (await quotas.get_quota(session, quota.id)).hard == 150
    await service.roll_back(session, (await last(session)).id)
    assert (await quotas.get_quota(session, quota.id)).hard == 100


async def test_f36_changes_are_listed_by_keyset_for_one_tenant_alone(session: AsyncSession, acme: TenantView) -> None:
    other = await make_tenant(session)
    for hard in range(1, 6):
        for slug in (acme.slug, other.slug):
            quota = await quotas.create_quota(session, slug, QuotaSpec(kind=DAY, hard=hard, model=f"m{hard}"))
            ends = later(hours=hard)
            await quotas.grant(session, quota.id, GrantSpec(amount=1, expires_at=ends, reason="x"), by="ada")
    found: list[ChangeView] = []
    after = None
    while True:
        page = await service.list_changes(session, tenant=acme.slug, after=after, limit=3)
        found += page.items
        after = page.next
        if after is None:
            break
    assert {one.tenant for one in found} == {acme.slug}
    assert [one.id for one in found] == sorted({one.id for one in found}, reverse=True)
    assert [one.object for one in found].count(PolicyObject.GRANTS) == 5


async def test_the_history_is_bounded(session: AsyncSession, acme: TenantView, monkeypatch: Any) -> None:
    monkeypatch.setattr(service, "MOST_KEPT", 2)
    quota = await quotas.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=1))
    for hard in range(2, 6):
        await quotas.change_quota(session, quota.id, QuotaPatch(hard=hard))
    newest = (await last(session)).id
    while await service.forget(session, limit=3) >= 3:
        pass
    kept = (await service.list_changes(session)).items
    assert [one.id for one in kept] == [newest, newest - 1]
    epochs = (await session.scalars(text("SELECT epoch FROM policy_epochs ORDER BY epoch"))).all()
    assert list(epochs) == [await policy_epoch(session) - 1, await policy_epoch(session)]


async def test_f38_of_a_rollback_and_a_change_at_once_one_wins_and_none_is_lost(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        tenant = await make_tenant(session)
        quota = await quotas.create_quota(session, tenant.slug, QuotaSpec(kind=DAY, hard=1))
        await quotas.change_quota(session, quota.id, QuotaPatch(hard=2))
        change = await last(session)

    async def edit() -> str:
        async with transaction(committed_engine) as session:
            await quotas.change_quota(session, quota.id, QuotaPatch(hard=9))
        return "edited"

    async def back() -> str:
        try:
            async with transaction(committed_engine) as session:
                await service.roll_back(session, change.id)
        except ConflictError as error:
            return error.code
        return "restored"

    outcomes = await asyncio.gather(back(), edit(), back())
    assert outcomes[1] == "edited"
    assert [outcomes[0], outcomes[2]].count("restored") <= 1
    async with transaction(committed_engine) as session:
        assert (await quotas.get_quota(session, quota.id)).hard in {1, 9}
        history = [one for one in (await service.list_changes(session)).items if one.object is PolicyObject.QUOTAS]
        values = [(one.before or {}).get("hard") for one in history], [(one.after or {}).get("hard") for one in history]
        assert values[0][:-1] == values[1][1:], "each change begins where the one before it ended"
