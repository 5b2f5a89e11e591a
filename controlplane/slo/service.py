"""Service level objectives as objects: creating, changing, and those that hold.

Layer: service. Every function takes the caller's session and never commits. A trigger announces each change to the
gateways. Error budgets and burn rates are computed elsewhere, from what is stored here.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, NotFoundError
from controlplane.idempotency import check_repeat
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.slo import repository
from controlplane.slo.models import SloRow
from controlplane.slo.schemas import Slo, SloPatch, SloSpec, SloView
from controlplane.slo.validation import check_class, check_objectives, check_pool
from controlplane.tenants.owner import resolve_owner

MOST_SLOS = 10_000
OBJECTIVES = ("ttft_ms", "ttft_share", "tpot_ms", "tpot_share", "availability", "window_days")


async def create_slo(session: AsyncSession, spec: SloSpec, *, idempotency_key: str | None = None) -> SloView:
    """New objectives. Repeated with the same idempotency key, those made before.

    Raises InvalidRequestError, NotFoundError, or ConflictError when tenant, pool and class have theirs.
    """
    check_objectives(**{name: getattr(spec, name) for name in OBJECTIVES})
    pool, service_class = check_pool(spec.pool), check_class(spec.service_class)
    owner = await resolve_owner(session, spec.tenant) if spec.tenant is not None else None
    asked = {"tenant": spec.tenant, "pool": pool, "service_class": service_class, "enabled": spec.enabled}
    asked |= {name: getattr(spec, name) for name in OBJECTIVES}
    before = await _before(session, idempotency_key)
    if before is None:
        if await repository.count(session) >= MOST_SLOS:
            raise ConflictError(f"there are {MOST_SLOS} objectives: remove some", code="too_many_slos")
        tenant_id = owner.tenant_id if owner else None
        added = await repository.add(session, tenant_id=tenant_id, idempotency_key=idempotency_key, **asked)
        if added is not None:
            return slo_view(added)
        before = await _before(session, idempotency_key)
    if before is None:
        raise ConflictError("this tenant, pool and class have objectives already: change them", code="slo_exists")
    check_repeat(f"the objectives {before.id}", {name: (value, getattr(before, name)) for name, value in asked.items()})
    return slo_view(before)


async def list_slos(
    session: AsyncSession, *, tenant: str | None = None, after: str | None = None, limit: int = 50
) -> Page[SloView]:
    """Objectives, oldest first; with `tenant` that tenant's own. One query. Raises InvalidRequestError."""
    limit, key = checked(limit), decode_uuid(after)
    rows = await repository.slos(session, tenant=tenant, after=key, limit=limit)
    return page(rows, limit, slo_view, lambda row: Cursor(row.created_at, str(row.id)))


async def get_slo(session: AsyncSession, slo_id: UUID) -> SloView:
    """Raises NotFoundError."""
    return slo_view(await _slo(session, slo_id))


async def change_slo(session: AsyncSession, slo_id: UUID, patch: SloPatch) -> SloView:
    """Change what `patch` sets. Raises InvalidRequestError or NotFoundError."""
    changes = {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}
    row = await _slo(session, slo_id, lock=True)
    if not changes:
        return slo_view(row)
    check_objectives(**{name: changes.get(name, getattr(row, name)) for name in OBJECTIVES})
    return slo_view(await repository.change(session, slo_id, changes))


async def delete_slo(session: AsyncSession, slo_id: UUID) -> SloView:
    """The objectives that are no more. Raises NotFoundError."""
    gone = await get_slo(session, slo_id)
    await repository.remove(session, slo_id)
    return gone


async def restore_slo(session: AsyncSession, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
    """Bring back what objectives were before a change; both are rows of the history as JSON, None where there was none.
    Raises ConflictError where others hold by now.
    """
    if before is None:
        assert after is not None
        await delete_slo(session, UUID(after["id"]))
        return
    values = {name: before[name] for name in (*OBJECTIVES, "enabled")}
    if after is not None:
        await change_slo(session, UUID(before["id"]), SloPatch(**values))
        return
    check_objectives(**{name: values[name] for name in OBJECTIVES})
    tenant_id = UUID(before["tenant_id"]) if before["tenant_id"] is not None else None
    if tenant_id is not None:
        await _require_tenant(session, tenant_id)
    added = await repository.add(
        session,
        id=UUID(before["id"]),
        tenant_id=tenant_id,
        tenant=before["tenant"],
        pool=before["pool"],
        service_class=before["class"],
        **values,
    )
    if added is None:
        raise ConflictError("it cannot be restored: others hold by now", code="not_reversible")


async def load_slos(session: AsyncSession) -> tuple[Slo, ...]:
    """All objectives that hold, for `schemas.slo_for`. One query."""
    return tuple(
        Slo(
            slo_id=str(row.id),
            tenant_id=str(row.tenant_id) if row.tenant_id else None,
            pool=row.pool,
            service_class=row.service_class,
            **{name: getattr(row, name) for name in OBJECTIVES},
        )
        for row in await repository.enabled(session)
    )


def slo_view(row: SloRow) -> SloView:
    """A row as operators see it."""
    return SloView(
        id=row.id,
        tenant=row.tenant,
        pool=row.pool or None,
        service_class=row.service_class or None,
        **{name: getattr(row, name) for name in OBJECTIVES},
        enabled=row.enabled,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


async def _require_tenant(session: AsyncSession, tenant_id: UUID) -> None:
    """Raises ConflictError: another tenant of the same slug is another one."""
    try:
        await resolve_owner(session, tenant_id)
    except NotFoundError as error:
        raise ConflictError("it cannot be restored: its tenant is gone", code="not_reversible") from error


async def _before(session: AsyncSession, idempotency_key: str | None) -> SloRow | None:
    """The objectives that this idempotency key has made."""
    return await repository.by_idempotency_key(session, idempotency_key) if idempotency_key else None


async def _slo(session: AsyncSession, slo_id: UUID, *, lock: bool = False) -> SloRow:
    row = await repository.one(session, slo_id, lock=lock)
    if row is None:
        raise NotFoundError(f"there are no objectives {slo_id}", code="slo_not_found", param="slo_id")
    return row
