"""Bringing back what a limit, a raise or a price was before a change.

Layer: service. `before` and `after` are rows of the history as JSON, None where there was none. What is brought back is
checked as anything new; prices that have been in force stay, and a new one continues what was before. Every function
raises ConflictError (`not_reversible`) where what was before cannot come again.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, NotFoundError
from controlplane.quotas import price_repository, price_service, repository, service
from controlplane.quotas.models import PriceRow
from controlplane.quotas.schemas import Away, QuotaKind
from controlplane.quotas.validation import check_quota
from controlplane.quotas.views import PriceSpec, QuotaPatch
from controlplane.tenants.owner import resolve_owner

Row = dict[str, Any]
_LIMITS = ("soft", "hard", "away", "local")


async def restore_quota(session: AsyncSession, before: Row | None, after: Row | None) -> None:
    """Remove a limit that was new, make again one that was removed, or change one back."""
    if before is None:
        assert after is not None
        await service.delete_quota(session, UUID(after["id"]))
        return
    if after is not None:
        patch = QuotaPatch(**{**{name: before[name] for name in _LIMITS}, "away": Away(before["away"])})
        await service.change_quota(session, UUID(before["id"]), patch)
        return
    project_id = UUID(before["project_id"]) if before["project_id"] is not None else None
    try:
        owner = await resolve_owner(session, UUID(before["tenant_id"]), project=project_id)
    except NotFoundError as error:
        raise _final(f"its {'project' if error.param == 'project' else 'tenant'} is gone") from error
    kind, away = QuotaKind(before["kind"]), Away(before["away"])
    check_quota(kind=kind, soft=before["soft"], hard=before["hard"], away=away, local=before["local"])
    if await repository.count_quotas(session, owner.tenant_id) >= service.MOST_QUOTAS:
        raise _final(f"the tenant {owner.tenant} has too many limits by now")
    added = await repository.add_quota(
        session,
        id=UUID(before["id"]),
        tenant_id=owner.tenant_id,
        tenant=owner.tenant,
        project_id=owner.project_id,
        **{name: before[name] for name in ("project", "key_identity", "model", "kind", *_LIMITS)},
    )
    if added is None:
        raise _final("there is another such limit by now")


async def restore_grant(session: AsyncSession, before: Row | None, after: Row | None) -> None:
    """End a raise that was new, or give again what was ended or removed, until its old end."""
    if before is None:
        assert after is not None
        await service.end_grant(session, UUID(after["quota_id"]), UUID(after["id"]))
        return
    starts_at, expires_at = (datetime.fromisoformat(before[name]) for name in ("starts_at", "expires_at"))
    if expires_at <= datetime.now(UTC):
        raise _final("the raise would be over by now")
    quota = await repository.quota(session, UUID(before["quota_id"]), lock=True)
    if quota is None:
        raise _final("its limit is gone: restore that first")
    await service.check_room(session, quota, quota.soft, quota.hard, more=before["amount"])
    if after is not None:
        await repository.change_grant(session, UUID(before["id"]), expires_at)
        return
    await repository.add_grant(
        session,
        id=UUID(before["id"]),
        quota_id=quota.id,
        tenant_id=quota.tenant_id,
        starts_at=starts_at,
        expires_at=expires_at,
        **{name: before[name] for name in ("amount", "reason", "granted_by")},
    )


async def restore_price(session: AsyncSession, before: Row | None, after: Row | None) -> None:
    """Take back a price that is planned, plan again one that was taken back, or let the price that one in force has
    ended begin anew now.
    """
    if before is not None and after is not None:
        raise _final("it ended because another price began: roll that one back")
    if before is not None:
        await _set(session, before, datetime.fromisoformat(before["valid_from"]))
        return
    assert after is not None
    starts_at = datetime.fromisoformat(after["valid_from"])
    now = await price_repository.lock(session, after["pool"])
    if starts_at > now:
        await price_service.take_back(session, UUID(after["id"]))
        return
    ended = await price_repository.ended_at(session, after["pool"], starts_at)
    if ended is None:
        raise _final("no price was in force before it: set another one")
    await _set(session, _amounts(ended) | {"pool": ended.pool, "set_by": after["set_by"]}, None)


async def _set(session: AsyncSession, row: Row, valid_from: datetime | None) -> None:
    if valid_from is not None and valid_from <= datetime.now(UTC):
        raise _final("its start has passed, and what was charged does not change")
    amounts = {name: row[name] for name in price_service.AMOUNTS}
    spec = PriceSpec(**amounts, pool=row["pool"] or None, valid_from=valid_from)
    await price_service.set_price(session, spec, by=row["set_by"])


def _amounts(row: PriceRow) -> Row:
    return {name: getattr(row, name) for name in price_service.AMOUNTS}


def _final(why: str) -> ConflictError:
    return ConflictError(f"it cannot be restored: {why}", code="not_reversible")
