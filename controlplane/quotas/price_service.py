"""Prices of pools with their history: a new one ends the one before, and what has been in force never changes.

Layer: service. Every function takes the caller's session and never commits. The database's clock decides what is past.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.idempotency import check_repeat
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.quotas import price_repository as repository
from controlplane.quotas.models import PriceRow
from controlplane.quotas.schemas import Price
from controlplane.quotas.validation import check_name, check_zone
from controlplane.quotas.views import LARGEST_RATE, PriceSpec, PriceView

AMOUNTS = ("uncached_input", "cached_input", "output", "device_second")
KEPT = timedelta(days=1)
"""How long after its end a gateway still knows a price: for a request that arrived in time and settles late."""


async def set_price(
    session: AsyncSession, spec: PriceSpec, *, by: str, idempotency_key: str | None = None
) -> PriceView:
    """A new price from `valid_from` or now, until the next one already planned. It ends the one before at its start.

    Repeated with the same idempotency key, the one made before. Raises InvalidRequestError for a start in the past, or
    ConflictError when a price of this pool starts at the very same instant.
    """
    for name in AMOUNTS:
        if not 0 <= getattr(spec, name) <= LARGEST_RATE:
            raise InvalidRequestError(f"{name} must lie between 0 and {LARGEST_RATE}", param=name)
    pool = check_name("pool", spec.pool)
    now = await repository.lock(session, pool)
    if idempotency_key and (before := await repository.price_by_idempotency_key(session, idempotency_key)):
        asked = {name: (getattr(spec, name), getattr(before, name)) for name in AMOUNTS}
        start_asked = (spec.valid_from or before.valid_from, before.valid_from)
        check_repeat(f"the price {before.id}", {"pool": (pool, before.pool), **asked, "valid_from": start_asked})
        return price_view(before)
    start = spec.valid_from or now
    check_zone("valid_from", start)
    if start < now:
        raise InvalidRequestError(
            "valid_from lies in the past, and what was charged does not change", param="valid_from"
        )
    following = await repository.following(session, pool, start)
    if following is not None and following.valid_from == start:
        raise ConflictError(
            "a price of this pool starts at that very instant: take it back first",
            code="price_exists",
            param="valid_from",
        )
    await repository.end_before(session, pool, start, start)
    added = await repository.add_price(
        session,
        pool=pool,
        **{name: getattr(spec, name) for name in AMOUNTS},
        valid_from=start,
        valid_until=following.valid_from if following else None,
        set_by=by,
        idempotency_key=idempotency_key,
    )
    return price_view(added)


async def list_prices(
    session: AsyncSession,
    *,
    pool: str | None = None,
    at: datetime | None = None,
    after: str | None = None,
    limit: int = 50,
) -> Page[PriceView]:
    """Prices, newest first; of `pool` ("" for the one of every pool), or those in force `at` an instant. One query."""
    limit, key = checked(limit), decode_uuid(after)
    if at is not None:
        check_zone("at", at)
    rows = await repository.prices(session, pool=pool, at=at, after=key, limit=limit)
    return page(rows, limit, price_view, lambda row: Cursor(row.valid_from, str(row.id)))


async def get_price(session: AsyncSession, price_id: UUID) -> PriceView:
    """Raises NotFoundError."""
    return price_view(await _price(session, price_id))


async def take_back(session: AsyncSession, price_id: UUID) -> PriceView:
    """Take back a price that has not started; the one before goes on in its place.

    Raises NotFoundError, or ConflictError when it has been in force.
    """
    row = await _price(session, price_id)
    now = await repository.lock(session, row.pool)
    row = await _price(session, price_id)
    if row.valid_from <= now:
        raise ConflictError(
            "the price has been in force, and what was charged does not change: set another one", code="price_in_force"
        )
    await repository.delete_price(session, price_id)
    await repository.end_before(session, row.pool, row.valid_from, row.valid_until)
    return price_view(row)


async def prices_in_force(session: AsyncSession) -> tuple[Price, ...]:
    """All prices in force now, to come, or ended within `KEPT`. One query."""
    rows = await repository.between(session, datetime.now(UTC) - KEPT, None)
    return tuple(_as_price(row) for row in rows)


async def prices_between(session: AsyncSession, since: datetime, until: datetime) -> tuple[Price, ...]:
    """All prices in force at any instant of [since, until), for a statement. One query."""
    return tuple(_as_price(row) for row in await repository.between(session, since, until))


def price_view(row: PriceRow) -> PriceView:
    """A row as operators see it."""
    return PriceView(
        id=row.id,
        pool=row.pool or None,
        uncached_input=row.uncached_input,
        cached_input=row.cached_input,
        output=row.output,
        device_second=row.device_second,
        valid_from=row.valid_from,
        valid_until=row.valid_until,
        set_by=row.set_by,
        created_at=row.created_at,
    )


def _as_price(row: PriceRow) -> Price:
    return Price(
        pool=row.pool,
        uncached_input=row.uncached_input,
        cached_input=row.cached_input,
        output=row.output,
        device_second=row.device_second,
        valid_from=row.valid_from.timestamp(),
        valid_until=row.valid_until.timestamp() if row.valid_until else None,
    )


async def _price(session: AsyncSession, price_id: UUID) -> PriceRow:
    row = await repository.price(session, price_id)
    if row is None:
        raise NotFoundError(f"there is no price {price_id}", code="price_not_found", param="price_id")
    return row
