"""Tenants' requests for more on a real database: approved, declined, once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.db import transaction
from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.quotas import request_service, service
from controlplane.quotas.limits import effective
from controlplane.quotas.request_service import Asker
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import (
    LARGEST_AMOUNT,
    ApprovalSpec,
    GrantSpec,
    MoreSpec,
    QuotaPatch,
    QuotaRequestSpec,
    QuotaSpec,
    RequestState,
)
from controlplane.tenants.schemas import TenantView
from tests.factories.rows import make_key, make_tenant

DAY = QuotaKind.TOKENS_PER_DAY


def later(**span: float) -> datetime:
    return datetime.now(UTC) + timedelta(**span)


@pytest.fixture
async def acme(session: AsyncSession) -> TenantView:
    return await make_tenant(session)


async def test_an_approved_request_raises_for_good_or_for_a_while(session: AsyncSession, acme: TenantView) -> None:
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, soft=80, hard=100))
    for_good = await request_service.ask(
        session, acme.id, QuotaRequestSpec(amount=50, reason="growth", kind=DAY), by="key k1"
    )
    assert (for_good.state, for_good.quota_id, for_good.asked_by) == (RequestState.OPEN, quota.id, "key k1")
    approved = await request_service.approve(session, for_good.id, by="op", given=ApprovalSpec(note="enjoy"))
    assert (approved.state, approved.decided_by, approved.note) == (RequestState.APPROVED, "op", "enjoy")
    changed = await service.get_quota(session, quota.id)
    assert (changed.soft, changed.hard, changed.raised) == (130, 150, 0)
    until = later(days=3)
    asked = QuotaRequestSpec(amount=9, reason="fair", quota_id=quota.id, until=until)
    waiting = await request_service.ask(session, acme.slug, asked, by="key k1")
    await request_service.approve(session, waiting.id, by="op")
    grants = (await service.list_grants(session, quota.id)).items
    assert [(each.amount, each.expires_at, each.granted_by, each.reason) for each in grants] == [
        (9, until, "op", "fair")
    ]
    for decide in (request_service.approve, request_service.decline):
        with pytest.raises(ConflictError, match="was approved by op"):
            await decide(session, waiting.id, by="other")
    assert (await service.get_quota(session, quota.id)).raised == 9
    with pytest.raises(NotFoundError):
        await request_service.approve(session, uuid4(), by="op")


async def test_a_wish_that_was_given_meanwhile_is_not_given_twice(session: AsyncSession, acme: TenantView) -> None:
    """Who wishes for 250 three times, and is approved three times, has 250."""
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    key = (await make_key(session, acme.slug)).view
    asker = Asker(tenant_id=acme.id, project=key.project, identity=key.identity, key_id=key.key_id)
    wish = MoreSpec(quota_id=quota.id, hard=250, reason="growth")
    first, second, third = [await request_service.ask_with_key(session, asker, wish) for _ in range(3)]
    await service.change_quota(session, quota.id, QuotaPatch(hard=120))
    approved = await request_service.approve(session, first.id, by="op")
    assert (approved.given, (await service.get_quota(session, quota.id)).hard) == (130, 250)
    with pytest.raises(ConflictError, match="250 already"):
        await request_service.approve(session, second.id, by="op")
    assert (await request_service.get_request(session, second.id)).state is RequestState.OPEN
    assert (await service.get_quota(session, quota.id)).hard == 250
    await request_service.approve(session, third.id, by="op", given=ApprovalSpec(amount=5))
    assert (await service.get_quota(session, quota.id)).hard == 255


async def test_a_declined_request_gives_nothing(session: AsyncSession, acme: TenantView) -> None:
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    asked = await request_service.ask(
        session, acme.slug, QuotaRequestSpec(amount=50, reason="growth", kind=DAY), by="k"
    )
    declined = await request_service.decline(session, asked.id, by="op", note="no room")
    assert (declined.state, declined.note) == (RequestState.DECLINED, "no room")
    assert (await service.get_quota(session, quota.id)).hard == 100
    open_ones = await request_service.list_requests(session, tenant=acme.slug, state=RequestState.OPEN)
    assert open_ones.items == []


async def test_an_approval_that_cannot_be_given_leaves_the_request_open(
    session: AsyncSession, acme: TenantView
) -> None:
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    gone = await request_service.ask(session, acme.slug, QuotaRequestSpec(amount=5, reason="x", kind=DAY), by="k")
    await service.delete_quota(session, quota.id)
    with pytest.raises(ConflictError, match="gone"):
        await request_service.approve(session, gone.id, by="op")
    assert (await request_service.get_request(session, gone.id)).state is RequestState.OPEN
    again = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=LARGEST_AMOUNT))
    much = await request_service.ask(
        session, acme.slug, QuotaRequestSpec(amount=1, reason="x", quota_id=again.id), by="k"
    )
    with pytest.raises(InvalidRequestError):
        await request_service.approve(session, much.id, by="op")
    assert (await request_service.get_request(session, much.id)).state is RequestState.OPEN


async def test_open_requests_of_a_tenant_are_bounded(
    session: AsyncSession, acme: TenantView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_service, "MOST_OPEN", 1)
    await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    spec = QuotaRequestSpec(amount=5, reason="x", kind=DAY)
    first = await request_service.ask(session, acme.slug, spec, by="k")
    with pytest.raises(ConflictError, match="wait"):
        await request_service.ask(session, acme.slug, spec, by="k")
    await request_service.decline(session, first.id, by="op")
    await request_service.ask(session, acme.slug, spec, by="k")


async def test_f2_of_many_approvals_at_once_one_gives(committed_engine: AsyncEngine) -> None:
    async with transaction(committed_engine) as session:
        acme = await make_tenant(session)
        quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
        asked = await request_service.ask(session, acme.slug, QuotaRequestSpec(amount=10, reason="x", kind=DAY), by="k")

    async def approve(number: int) -> bool:
        try:
            async with transaction(committed_engine) as session:
                await request_service.approve(session, asked.id, by=f"op {number}")
        except ConflictError:
            return False
        return True

    given = await asyncio.gather(*(approve(number) for number in range(12)))
    assert sum(given) == 1
    async with transaction(committed_engine) as session:
        assert (await service.get_quota(session, quota.id)).hard == 110


async def test_f2_two_approvals_at_once_do_not_wait_for_each_other(
    committed_engine: AsyncEngine,
) -> None:
    """One of what is asked and one of something else come to limit and request in one order: one gives."""
    async with transaction(committed_engine) as session:
        acme = await make_tenant(session)
        quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
        asked = await request_service.ask(session, acme.slug, QuotaRequestSpec(amount=10, reason="x", kind=DAY), by="k")

    async def approve(given: ApprovalSpec | None) -> str:
        try:
            async with transaction(committed_engine) as session:
                await request_service.approve(session, asked.id, by="op", given=given)
        except ConflictError as error:
            return error.code
        return "given"

    async with committed_engine.connect() as holder:
        await holder.execute(text("SELECT FROM quotas FOR UPDATE"))
        approvals = []
        for given in (None, ApprovalSpec(amount=10)):
            approvals.append(asyncio.create_task(approve(given)))
            async with asyncio.timeout(10):
                while await waiting(committed_engine) < len(approvals):
                    await asyncio.sleep(0.01)
        await holder.rollback()
        assert sorted(await asyncio.gather(*approvals)) == ["given", "request_decided"]
    async with transaction(committed_engine) as session:
        assert (await service.get_quota(session, quota.id)).hard == 110


async def waiting(engine: AsyncEngine) -> int:
    """How many transactions wait for a lock."""
    found = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    async with engine.connect() as connection:
        return int(await connection.scalar(found))


async def test_a_wish_for_a_while_counts_what_raises_already_give_until_then(
    session: AsyncSession, acme: TenantView
) -> None:
    """Who wishes for 250 until Friday three times, and is approved three times, has 250 until Friday."""
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    key = (await make_key(session, acme.slug)).view
    asker = Asker(tenant_id=acme.id, project=key.project, identity=key.identity, key_id=key.key_id)
    wish = MoreSpec(quota_id=quota.id, hard=250, reason="launch", until=later(days=3))
    first, second, third = [await request_service.ask_with_key(session, asker, wish) for _ in range(3)]
    short = GrantSpec(amount=60, expires_at=later(days=1), reason="not until then")
    long = GrantSpec(amount=30, expires_at=later(days=9), reason="beyond then")
    for raised in (short, long):
        await service.grant(session, quota.id, raised, by="op")
    approved = await request_service.approve(session, first.id, by="op")
    assert (approved.given, approved.given_until) == (120, wish.until)
    limit = (await service.load_tenant_quotas(session, acme.id)).limits[0]
    assert effective(limit, later(days=2).timestamp()) == (None, 250)
    assert effective(limit, later(days=4).timestamp()) == (None, 130)
    with pytest.raises(ConflictError, match="250 already"):
        await request_service.approve(session, second.id, by="op")
    assert (await request_service.get_request(session, second.id)).state is RequestState.OPEN
    longer = await request_service.approve(session, second.id, by="op", given=ApprovalSpec(until=later(days=5)))
    assert longer.given == 120
    for_good = await request_service.approve(session, third.id, by="op", given=ApprovalSpec(until=None))
    assert (for_good.given, (await service.get_quota(session, quota.id)).hard) == (150, 250)
