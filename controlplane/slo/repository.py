"""Queries over objectives. Layer: service. Only queries: no rules, no commit."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.slo.models import SloRow


async def add(session: AsyncSession, **values: Any) -> SloRow | None:
    """None when there are such objectives, or the idempotency key is taken."""
    added = await session.scalars(insert(SloRow).values(**values).on_conflict_do_nothing().returning(SloRow))
    return added.one_or_none()


async def by_idempotency_key(session: AsyncSession, key: str) -> SloRow | None:
    return (await session.scalars(select(SloRow).where(SloRow.idempotency_key == key))).one_or_none()


async def count(session: AsyncSession) -> int:
    return int(await session.scalar(select(func.count()).select_from(SloRow)) or 0)


async def one(session: AsyncSession, slo_id: UUID, *, lock: bool = False) -> SloRow | None:
    query = select(SloRow).where(SloRow.id == slo_id).execution_options(populate_existing=True)
    return (await session.scalars(query.with_for_update() if lock else query)).one_or_none()


async def slos(
    session: AsyncSession, *, tenant: str | None, after: tuple[datetime, UUID] | None, limit: int
) -> list[SloRow]:
    """Oldest first, one more than `limit`; those of one tenant alone, not those for all."""
    query = select(SloRow).order_by(SloRow.created_at, SloRow.id).limit(limit + 1)
    if tenant is not None:
        query = query.where(SloRow.tenant == tenant)
    if after is not None:
        query = query.where(tuple_(SloRow.created_at, SloRow.id) > tuple_(*after))
    return list(await session.scalars(query))


async def change(session: AsyncSession, slo_id: UUID, changes: dict[str, Any]) -> SloRow:
    """The changed objectives, which the caller has locked."""
    changed = await session.scalars(
        update(SloRow)
        .where(SloRow.id == slo_id)
        .values(**changes, updated_at=func.now())
        .returning(SloRow)
        .execution_options(populate_existing=True)
    )
    return changed.one()


async def remove(session: AsyncSession, slo_id: UUID) -> None:
    await session.execute(delete(SloRow).where(SloRow.id == slo_id))


async def enabled(session: AsyncSession) -> list[SloRow]:
    """All objectives that hold, in a fixed order."""
    return list(await session.scalars(select(SloRow).where(SloRow.enabled).order_by(SloRow.id)))
