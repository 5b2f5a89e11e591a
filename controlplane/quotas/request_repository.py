"""Queries over tenants' requests for more. Layer: service. Only queries: no rules, no commit."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, and_, func, or_, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.quotas.models import Quota, QuotaRequest
from controlplane.quotas.views import RequestState

_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('tidegate quota requests of ' || :tenant, 0))")


async def lock(session: AsyncSession, tenant_id: UUID) -> None:
    """Nobody else asks for this tenant until the transaction ends."""
    await session.execute(_LOCK, {"tenant": str(tenant_id)})


async def add(session: AsyncSession, **values: Any) -> QuotaRequest | None:
    """None when the idempotency key is taken in this tenant."""
    added = await session.scalars(
        insert(QuotaRequest).values(**values).on_conflict_do_nothing().returning(QuotaRequest)
    )
    return added.one_or_none()


async def by_idempotency_key(session: AsyncSession, tenant_id: UUID, key: str) -> QuotaRequest | None:
    found = await session.scalars(
        select(QuotaRequest).where(QuotaRequest.tenant_id == tenant_id, QuotaRequest.idempotency_key == key)
    )
    return found.one_or_none()


async def count_open(session: AsyncSession, tenant_id: UUID | None, most: int) -> int:
    """Open requests of one tenant or of all, at most `most`."""
    query = select(QuotaRequest.id).where(QuotaRequest.state == RequestState.OPEN)
    if tenant_id is not None:
        query = query.where(QuotaRequest.tenant_id == tenant_id)
    return int(await session.scalar(select(func.count()).select_from(query.limit(most).subquery())) or 0)


def _concerns(project: str, identity: str) -> ColumnElement[bool]:
    """Requests about limits that a key of `project` meets: its own, its project's, the tenant's."""
    table = QuotaRequest
    wider = and_(table.key_identity.is_(None), or_(table.project.is_(None), table.project == project))
    return or_(table.key_identity == identity, wider)


async def of_key(
    session: AsyncSession,
    tenant_id: UUID,
    project: str,
    identity: str,
    *,
    after: tuple[datetime, UUID] | None,
    limit: int,
) -> list[QuotaRequest]:
    """Newest first, one more than `limit`."""
    order = (QuotaRequest.created_at, QuotaRequest.id)
    query = select(QuotaRequest).where(QuotaRequest.tenant_id == tenant_id, _concerns(project, identity))
    if after is not None:
        query = query.where(tuple_(*order) < tuple_(*after))
    return list(await session.scalars(query.order_by(*(each.desc() for each in order)).limit(limit + 1)))


async def one_of_key(
    session: AsyncSession, tenant_id: UUID, project: str, identity: str, request_id: UUID
) -> QuotaRequest | None:
    query = select(QuotaRequest).where(
        QuotaRequest.id == request_id, QuotaRequest.tenant_id == tenant_id, _concerns(project, identity)
    )
    return (await session.scalars(query)).one_or_none()


async def one(session: AsyncSession, request_id: UUID) -> QuotaRequest | None:
    query = select(QuotaRequest).where(QuotaRequest.id == request_id).execution_options(populate_existing=True)
    return (await session.scalars(query)).one_or_none()


async def lock_quota(session: AsyncSession, request_id: UUID) -> Quota | None:
    """The limit that a request asks about, locked until the transaction ends; None when either is gone. It is locked
    before its request, as by who removes it.
    """
    query = select(Quota).join(QuotaRequest, QuotaRequest.quota_id == Quota.id).where(QuotaRequest.id == request_id)
    found = await session.scalars(query.with_for_update(of=Quota).execution_options(populate_existing=True))
    return found.one_or_none()


async def requests(
    session: AsyncSession,
    *,
    tenant: str | None,
    state: RequestState | None,
    after: tuple[datetime, UUID] | None,
    limit: int,
) -> list[QuotaRequest]:
    """Oldest first, one more than `limit`."""
    query = select(QuotaRequest).order_by(QuotaRequest.created_at, QuotaRequest.id).limit(limit + 1)
    if tenant is not None:
        query = query.where(QuotaRequest.tenant == tenant)
    if state is not None:
        query = query.where(QuotaRequest.state == state)
    if after is not None:
        query = query.where(tuple_(QuotaRequest.created_at, QuotaRequest.id) > tuple_(*after))
    return list(await session.scalars(query))


async def decide(session: AsyncSession, request_id: UUID, state: RequestState, **values: Any) -> QuotaRequest | None:
    """Claim the decision of an open request; None when there is none, or somebody has decided it."""
    decided = await session.scalars(
        update(QuotaRequest)
        .where(QuotaRequest.id == request_id, QuotaRequest.state == RequestState.OPEN)
        .values(state=state, decided_at=func.now(), **values)
        .returning(QuotaRequest)
        .execution_options(populate_existing=True)
    )
    return decided.one_or_none()
