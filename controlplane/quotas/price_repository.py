"""Queries over prices. Layer: service. Only queries; a trigger of migration 0004 keeps what has been in force."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, or_, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.quotas.models import PriceRow

_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('tidegate price of ' || :pool, 0))")


async def lock(session: AsyncSession, pool: str) -> datetime:
    """Nobody else changes this pool's prices until the transaction ends; answers the database's time after that."""
    await session.execute(_LOCK, {"pool": pool})
    now: datetime = (await session.execute(select(func.clock_timestamp()))).scalar_one()
    return now


async def price(session: AsyncSession, price_id: UUID) -> PriceRow | None:
    query = select(PriceRow).where(PriceRow.id == price_id).execution_options(populate_existing=True)
    return (await session.scalars(query)).one_or_none()


async def price_by_idempotency_key(session: AsyncSession, key: str) -> PriceRow | None:
    return (await session.scalars(select(PriceRow).where(PriceRow.idempotency_key == key))).one_or_none()


async def following(session: AsyncSession, pool: str, at: datetime) -> PriceRow | None:
    """The first price of `pool` that starts at `at` or later."""
    query = select(PriceRow).where(PriceRow.pool == pool, PriceRow.valid_from >= at)
    return (await session.scalars(query.order_by(PriceRow.valid_from).limit(1))).one_or_none()


async def ended_at(session: AsyncSession, pool: str, at: datetime) -> PriceRow | None:
    """The price of `pool` that ended at `at`."""
    query = select(PriceRow).where(PriceRow.pool == pool, PriceRow.valid_until == at)
    return (await session.scalars(query)).one_or_none()


async def end_before(session: AsyncSession, pool: str, at: datetime, until: datetime | None) -> None:
    """Let the last price of `pool` that starts before `at` end at `until`, if it reaches as far as `at`."""
    await session.execute(
        update(PriceRow)
        .where(
            PriceRow.pool == pool,
            PriceRow.valid_from < at,
            or_(PriceRow.valid_until.is_(None), PriceRow.valid_until >= at),
        )
        .values(valid_until=until)
        .execution_options(synchronize_session=False)
    )


async def add_price(session: AsyncSession, **values: Any) -> PriceRow:
    return (await session.scalars(insert(PriceRow).values(**values).returning(PriceRow))).one()


async def delete_price(session: AsyncSession, price_id: UUID) -> None:
    await session.execute(delete(PriceRow).where(PriceRow.id == price_id))


async def prices(
    session: AsyncSession,
    *,
    pool: str | None,
    at: datetime | None,
    after: tuple[datetime, UUID] | None,
    limit: int,
) -> list[PriceRow]:
    """Newest first, one more than `limit`; those of one pool, those in force at an instant."""
    query = select(PriceRow).order_by(PriceRow.valid_from.desc(), PriceRow.id.desc()).limit(limit + 1)
    if pool is not None:
        query = query.where(PriceRow.pool == pool)
    if at is not None:
        query = query.where(PriceRow.valid_from <= at, or_(PriceRow.valid_until.is_(None), PriceRow.valid_until > at))
    if after is not None:
        query = query.where(tuple_(PriceRow.valid_from, PriceRow.id) < tuple_(*after))
    return list(await session.scalars(query))


async def between(session: AsyncSession, since: datetime, until: datetime | None) -> list[PriceRow]:
    """All prices in force at any instant of [since, until), those to come too for None; by pool and time."""
    query = select(PriceRow).where(or_(PriceRow.valid_until.is_(None), PriceRow.valid_until > since))
    if until is not None:
        query = query.where(PriceRow.valid_from < until)
    return list(await session.scalars(query.order_by(PriceRow.pool, PriceRow.valid_from)))
