"""Quotas, raises and requests for more on a real database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError, TidegateError
from controlplane.quotas import request_service, service
from controlplane.quotas.limits import effective, limits_for
from controlplane.quotas.schemas import Away, QuotaKind, QuotaLevel
from controlplane.quotas.views import (
    LARGEST_AMOUNT,
    GrantSpec,
    QuotaPatch,
    QuotaRequestSpec,
    QuotaSpec,
)
from controlplane.tenants.schemas import TenantView
from tests.factories.rows import make_key, make_tenant

DAY = QuotaKind.TOKENS_PER_DAY
RPM = QuotaKind.REQUESTS_PER_MINUTE


def later(**span: float) -> datetime:
    return datetime.now(UTC) + timedelta(**span)


@pytest.fixture
async def acme(session: AsyncSession) -> TenantView:
    return await make_tenant(session)


async def test_a_limit_of_each_level_is_made_and_a_request_meets_all_of_them(
    session: AsyncSession, acme: TenantView
) -> None:
    key = (await make_key(session, acme.slug)).view.key_id
    made = [
        await service.create_quota(session, acme.slug, spec)
        for spec in (
            QuotaSpec(kind=DAY, hard=1000),
            QuotaSpec(kind=DAY, hard=500, model="m"),
            QuotaSpec(kind=DAY, soft=300, project="default"),
            QuotaSpec(kind=RPM, hard=10, key=key, away=Away.LOCAL, local=2),
        )
    ]
    assert [quota.level for quota in made] == [QuotaLevel.TENANT] * 2 + [QuotaLevel.PROJECT, QuotaLevel.KEY]
    quotas = await service.load_tenant_quotas(session, acme.id)
    assert (quotas.tenant_id, quotas.tenant, quotas.time_zone) == (str(acme.id), acme.slug, "UTC")
    project = next(limit.scope_id for limit in quotas.limits if limit.level is QuotaLevel.PROJECT)
    met = limits_for(quotas, project_id=project, identity=key, model="m")
    assert {limit.quota_id for limit in met} == {str(quota.id) for quota in made}
    other = limits_for(quotas, project_id=str(uuid4()), identity="someoneelse", model="n")
    assert [limit.quota_id for limit in other] == [str(made[0].id)]
    mine = next(limit for limit in met if limit.level is QuotaLevel.KEY)
    assert (mine.scope_id, mine.hard, mine.away, mine.local) == (key, 10, Away.LOCAL, 2)


async def test_all_a_gateway_needs_of_a_tenant_is_three_queries_however_much_it_is(
    session: AsyncSession, engine: AsyncEngine, acme: TenantView
) -> None:
    for number in range(20):
        quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=9, model=f"m{number}"))
        for _ in range(2):
            await service.grant(session, quota.id, GrantSpec(amount=1, expires_at=later(days=1), reason="x"), by="me")
    statements: list[str] = []
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *run: statements.append(run[2]))
    quotas = await service.load_tenant_quotas(session, str(acme.id))
    assert len(quotas.limits) == 20
    assert all(len(limit.raises) == 2 for limit in quotas.limits)
    assert 1 <= len([each for each in statements if "SAVEPOINT" not in each]) <= 3
    statements.clear()
    await service.list_quotas(session, acme.slug)
    assert 1 <= len([each for each in statements if "SAVEPOINT" not in each]) <= 3


async def test_a_raise_counts_while_it_holds_and_can_be_ended_early(session: AsyncSession, acme: TenantView) -> None:
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, soft=80, hard=100))
    ends = later(hours=2)
    now = await service.grant(session, quota.id, GrantSpec(amount=50, expires_at=ends, reason="launch"), by="op")
    await service.grant(
        session, quota.id, GrantSpec(amount=7, starts_at=later(hours=1), expires_at=ends, reason="later"), by="op"
    )
    assert (await service.get_quota(session, quota.id)).raised == 50
    limit = (await service.load_tenant_quotas(session, acme.id)).limits[0]
    assert effective(limit, datetime.now(UTC).timestamp()) == (130, 150)
    assert effective(limit, later(minutes=90).timestamp()) == (137, 157)
    assert effective(limit, ends.timestamp()) == (80, 100)
    ended = await service.end_grant(session, quota.id, now.id)
    assert ended.expires_at < ends
    assert await service.end_grant(session, quota.id, now.id) == ended
    assert (await service.get_quota(session, quota.id)).raised == 0
    assert len((await service.list_grants(session, quota.id)).items) == 2


async def test_a_raise_that_never_started_never_does(session: AsyncSession, acme: TenantView) -> None:
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    spec = GrantSpec(amount=5, starts_at=later(hours=1), expires_at=later(hours=2), reason="x")
    planned = await service.grant(session, quota.id, spec, by="op")
    ended = await service.end_grant(session, quota.id, planned.id)
    assert ended.starts_at == ended.expires_at
    limit = (await service.load_tenant_quotas(session, acme.id)).limits[0]
    assert effective(limit, later(minutes=90).timestamp()) == (None, 100)


async def test_f10_a_repeat_makes_no_second_one(session: AsyncSession, acme: TenantView) -> None:
    spec = QuotaSpec(kind=DAY, hard=100)
    first = await service.create_quota(session, acme.slug, spec, idempotency_key="once")
    assert await service.create_quota(session, acme.slug, spec, idempotency_key="once") == first
    with pytest.raises(ConflictError, match="already made"):
        await service.create_quota(session, acme.slug, QuotaSpec(kind=RPM, hard=1), idempotency_key="once")
    with pytest.raises(ConflictError, match="change it"):
        await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=5))
    raised = GrantSpec(amount=5, expires_at=later(days=1), reason="x")
    grants = [await service.grant(session, first.id, raised, by="op", idempotency_key="g") for _ in range(2)]
    assert grants[0] == grants[1]
    asked = QuotaRequestSpec(amount=5, reason="x", quota_id=first.id)
    requests = [await request_service.ask(session, acme.slug, asked, by="key", idempotency_key="r") for _ in range(2)]
    assert requests[0] == requests[1]
    assert (await service.get_quota(session, first.id)).raised == 5


async def test_f10_limits_of_a_tenant_are_bounded_and_a_repeat_is_none_more(
    session: AsyncSession, acme: TenantView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_QUOTAS", 1)
    spec = QuotaSpec(kind=DAY, hard=100)
    made = await service.create_quota(session, acme.slug, spec, idempotency_key="once")
    assert await service.create_quota(session, acme.slug, spec, idempotency_key="once") == made
    with pytest.raises(ConflictError, match="remove some"):
        await service.create_quota(session, acme.slug, QuotaSpec(kind=RPM, hard=1), idempotency_key="another")


async def test_f10_a_limit_of_a_key_is_kept_under_its_identity(session: AsyncSession, acme: TenantView) -> None:
    first = (await make_key(session, acme.slug)).view.key_id
    second = (await make_key(session, acme.slug)).view.key_id
    await session.execute(text("UPDATE api_keys SET identity = :a WHERE key_id = :b"), {"a": first, "b": second})
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=RPM, hard=1, key=second))
    assert quota.key == first
    with pytest.raises(ConflictError):
        await service.create_quota(session, acme.slug, QuotaSpec(kind=RPM, hard=2, key=first))


async def test_a_change_is_checked_with_what_stays(session: AsyncSession, acme: TenantView) -> None:
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, soft=80, hard=100))
    with pytest.raises(InvalidRequestError) as refused:
        await service.change_quota(session, quota.id, QuotaPatch(hard=70))
    assert refused.value.param == "soft"
    changed = await service.change_quota(session, quota.id, QuotaPatch(soft=None, hard=70, away=Away.OPEN))
    assert (changed.soft, changed.hard, changed.away) == (None, 70, Away.OPEN)
    with pytest.raises(InvalidRequestError):
        await service.change_quota(session, quota.id, QuotaPatch(hard=None))
    assert await service.change_quota(session, quota.id, QuotaPatch()) == changed


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (QuotaSpec(kind=DAY), "hard"),
        (QuotaSpec(kind=DAY, hard=-1), "hard"),
        (QuotaSpec(kind=DAY, soft=LARGEST_AMOUNT + 1), "soft"),
        (QuotaSpec(kind=DAY, soft=2, hard=1), "soft"),
        (QuotaSpec(kind=DAY, hard=1, local=1), "local"),
        (QuotaSpec(kind=DAY, hard=1, away=Away.LOCAL), "local"),
        (QuotaSpec(kind=DAY, hard=1, away=Away.LOCAL, local=2), "local"),
        (QuotaSpec(kind=QuotaKind.MAX_PROMPT_TOKENS, hard=1, away=Away.OPEN), "away"),
        (QuotaSpec(kind=DAY, hard=1, model=" "), "model"),
        (QuotaSpec(kind=DAY, hard=1, model="a\nb"), "model"),
        (QuotaSpec(kind=DAY, hard=1, project="default", key="x"), "key"),
        (QuotaSpec(kind=DAY, hard=1, project="nowhere"), "project"),
        (QuotaSpec(kind=DAY, hard=1, key="nosuchkey00"), "key"),
    ],
)
async def test_a_limit_that_cannot_be_is_refused_naming_the_field(
    session: AsyncSession, acme: TenantView, spec: QuotaSpec, param: str
) -> None:
    with pytest.raises(TidegateError) as refused:
        await service.create_quota(session, acme.slug, spec)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (GrantSpec(amount=0, expires_at=later(days=1), reason="x"), "amount"),
        (GrantSpec(amount=LARGEST_AMOUNT, expires_at=later(days=1), reason="x"), "amount"),
        (GrantSpec(amount=1, expires_at=later(days=-1), reason="x"), "expires_at"),
        (GrantSpec(amount=1, starts_at=later(days=2), expires_at=later(days=1), reason="x"), "expires_at"),
        (GrantSpec(amount=1, expires_at=later(days=400), reason="x"), "expires_at"),
        (GrantSpec(amount=1, expires_at=datetime(2999, 1, 1), reason="x"), "expires_at"),
        (GrantSpec(amount=1, expires_at=later(days=1), reason="  "), "reason"),
    ],
)
async def test_a_raise_that_cannot_be_is_refused_naming_the_field(
    session: AsyncSession, acme: TenantView, spec: GrantSpec, param: str
) -> None:
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    with pytest.raises(InvalidRequestError) as refused:
        await service.grant(session, quota.id, spec, by="op")
    assert refused.value.param == param


async def test_raises_that_are_not_over_are_bounded(
    session: AsyncSession, acme: TenantView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_GRANTS", 2)
    quota = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    spec = GrantSpec(amount=1, expires_at=later(days=1), reason="x")
    first = await service.grant(session, quota.id, spec, by="op")
    await service.grant(session, quota.id, spec, by="op")
    with pytest.raises(ConflictError, match="end some"):
        await service.grant(session, quota.id, spec, by="op")
    await service.end_grant(session, quota.id, first.id)
    await service.grant(session, quota.id, spec, by="op")


async def test_lists_come_in_pages_and_can_be_narrowed(session: AsyncSession, acme: TenantView) -> None:
    made = [
        (await service.create_quota(session, acme.slug, QuotaSpec(kind=kind, hard=1, project=project))).id
        for kind in (DAY, RPM)
        for project in (None, "default")
    ]
    seen: list[UUID] = []
    after = None
    while True:
        page = await service.list_quotas(session, acme.slug, limit=3, after=after)
        seen += [quota.id for quota in page.items]
        if (after := page.next) is None:
            break
    assert sorted(seen) == sorted(made)
    rpm = (await service.list_quotas(session, acme.slug, kind=RPM)).items
    assert [quota.kind for quota in rpm] == [RPM, RPM]
    in_project = (await service.list_quotas(session, acme.slug, project="default")).items
    assert {quota.project for quota in in_project} == {"default"}
    nobody = uuid4()
    assert await service.count_by_tenant(session, [acme.id, nobody]) == {acme.id: 4, nobody: 0}
    with pytest.raises(InvalidRequestError):
        await service.list_quotas(session, acme.slug, after="junk")
    with pytest.raises(InvalidRequestError):
        await service.list_quotas(session, acme.slug, limit=0)


async def test_f36_nothing_of_another_tenant_is_listed_reached_or_asked_for(
    session: AsyncSession, acme: TenantView
) -> None:
    other = await make_tenant(session)
    theirs = await service.create_quota(session, other.slug, QuotaSpec(kind=DAY, hard=100))
    their_key = (await make_key(session, other.slug)).view.key_id
    await request_service.ask(session, other.slug, QuotaRequestSpec(amount=1, reason="x", kind=DAY), by="k")
    assert (await service.list_quotas(session, acme.slug)).items == []
    assert (await request_service.list_requests(session, tenant=acme.slug)).items == []
    assert (await service.load_tenant_quotas(session, acme.id)).limits == ()
    with pytest.raises(NotFoundError):
        await request_service.ask(
            session, acme.slug, QuotaRequestSpec(amount=1, reason="x", quota_id=theirs.id), by="k"
        )
    with pytest.raises(NotFoundError):
        await request_service.ask(session, acme.slug, QuotaRequestSpec(amount=1, reason="x", kind=DAY), by="k")
    with pytest.raises(NotFoundError):
        await service.create_quota(session, acme.slug, QuotaSpec(kind=RPM, hard=1, key=their_key))
    mine = await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    grant = await service.grant(session, theirs.id, GrantSpec(amount=1, expires_at=later(days=1), reason="x"), by="op")
    with pytest.raises(NotFoundError):
        await service.end_grant(session, mine.id, grant.id)


@pytest.mark.parametrize(
    "change",
    [
        "kind = 'anything'",
        "away = 'never'",
        "soft = NULL, hard = NULL",
        "soft = 101",
        "hard = -1",
        "away = 'local'",
        "local = 1",
    ],
)
async def test_the_database_itself_refuses_what_no_limit_can_be(
    session: AsyncSession, acme: TenantView, change: str
) -> None:
    await service.create_quota(session, acme.slug, QuotaSpec(kind=DAY, hard=100))
    with pytest.raises(IntegrityError):
        await session.execute(text(f"UPDATE quotas SET {change}"))
