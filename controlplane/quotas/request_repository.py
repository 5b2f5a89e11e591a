"""Queries over tenants' requests for more. Layer: service. Only queries: no rules, no commit."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.quotas.models import QuotaRequest
from controlplane.quotas.views import RequestState


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


async def count_open(session: AsyncSession, tenant_id: UUID) -> int:
    query = select(func.count()).where(QuotaRequest.tenant_id == tenant_id, QuotaRequest.state == RequestState.OPEN)
    return int(await session.scalar(query) or 0)


async def one(session: AsyncSession, request_id: UUID) -> QuotaRequest | None:
    query = select(QuotaRequest).where(QuotaRequest.id == request_id).execution_options(populate_existing=True)
    return (await session.scalars(query)).one_or_none()


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


async def decide(
    session: AsyncSession, request_id: UUID, state: RequestState, *, by: str, note: str
) -> QuotaRequest | None:
    """Claim the decision of an open request; None when there is none, or somebody has decided it."""
    decided = await session.scalars(
        update(QuotaRequest)
        .where(QuotaRequest.id == request_id, QuotaRequest.state == RequestState.OPEN)
        .values(state=state, decided_by=by, decided_at=func.now(), note=note)
        .returning(QuotaRequest)
        .execution_options(populate_existing=True)
    )
    return decided.one_or_none()
