"""Quotas and their temporary raises: creating, changing, and what a gateway needs of them.

Layer: service. Every function takes the caller's session and never commits. A trigger announces each change to the
gateways, so nothing here has to. Prices are `price_service`'s, requests for more `request_service`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from uuid import UUID

from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.idempotency import check_repeat
from controlplane.paging import Cursor, Page, checked, decode_uuid, page
from controlplane.quotas import price_service, repository
from controlplane.quotas.limits import lowest
from controlplane.quotas.models import Grant, Quota
from controlplane.quotas.schemas import Away, Limit, QuotaKind, QuotaLevel, Raise, TenantQuotas
from controlplane.quotas.validation import check_more, check_name, check_quota, check_span, check_text
from controlplane.quotas.views import LARGEST_AMOUNT, GrantSpec, GrantView, QuotaPatch, QuotaSpec, QuotaView
from controlplane.tenants.owner import Owner, active_owners, resolve_owner

MOST_QUOTAS = 10_000
"""Limits of one tenant."""
MOST_GRANTS = 100
"""Raises of one limit that are in force or yet to come."""


async def create_quota(
    session: AsyncSession, tenant: str, spec: QuotaSpec, *, idempotency_key: str | None = None
) -> QuotaView:
    """A new limit. Repeated with the same idempotency key, the one made before.

    Raises InvalidRequestError, NotFoundError, or ConflictError when the scope has such a limit or too many.
    """
    check_quota(kind=spec.kind, soft=spec.soft, hard=spec.hard, away=spec.away, local=spec.local)
    model = check_name("model", spec.model)
    if spec.project is not None and spec.key is not None:
        raise InvalidRequestError("a limit is a project's or a key's, not both", param="key")
    owner = await resolve_owner(session, tenant, project=spec.project, key_id=spec.key)
    before = await _before(session, owner, idempotency_key)
    if before is None:
        added = await _add_quota(session, owner, spec, model, idempotency_key)
        if added is not None:
            return quota_view(added)
        before = await _before(session, owner, idempotency_key)
    if before is None:
        raise ConflictError(
            f"there is such a limit of {spec.kind} already: change it", code="quota_exists", param="kind"
        )
    asked = {
        "project": (owner.project_id, before.project_id),
        "key": (owner.identity, before.key_identity),
        "model": (model, before.model),
        **{name: (getattr(spec, name), getattr(before, name)) for name in ("kind", "soft", "hard", "away", "local")},
    }
    check_repeat(f"the quota {before.id}", asked)
    return (await _views(session, [before]))[0]


async def list_quotas(
    session: AsyncSession,
    tenant: str,
    *,
    project: str | None = None,
    kind: QuotaKind | None = None,
    after: str | None = None,
    limit: int = 50,
) -> Page[QuotaView]:
    """A tenant's limits, oldest first. Three queries. Raises NotFoundError or InvalidRequestError."""
    limit, key = checked(limit), decode_uuid(after)
    owner = await resolve_owner(session, tenant)
    rows = await repository.quotas(session, owner.tenant_id, project=project, kind=kind, after=key, limit=limit)
    raised = await repository.raised(session, [row.id for row in rows], _now()) if rows else {}
    return page(
        rows,
        limit,
        lambda row: quota_view(row, raised.get(row.id, 0)),
        lambda row: Cursor(row.created_at, str(row.id)),
    )


async def get_quota(session: AsyncSession, quota_id: UUID) -> QuotaView:
    """Raises NotFoundError."""
    return (await _views(session, [await _quota(session, quota_id)]))[0]


async def change_quota(session: AsyncSession, quota_id: UUID, patch: QuotaPatch) -> QuotaView:
    """Change what `patch` sets. Raises InvalidRequestError or NotFoundError."""
    changes = {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}
    row = await _quota(session, quota_id, lock=True)
    if changes:
        soft, hard = changes.get("soft", row.soft), changes.get("hard", row.hard)
        away, local = Away(changes.get("away", row.away)), changes.get("local", row.local)
        check_quota(kind=QuotaKind(row.kind), soft=soft, hard=hard, away=away, local=local)
        await check_room(session, row, soft, hard)
        row = await repository.change_quota(session, quota_id, changes)
    return (await _views(session, [row]))[0]


async def delete_quota(session: AsyncSession, quota_id: UUID) -> QuotaView:
    """The limit that is no more, with its raises. Raises NotFoundError."""
    gone = await get_quota(session, quota_id)
    await repository.delete_quota(session, quota_id)
    return gone


async def count_by_tenant(session: AsyncSession, tenant_ids: Collection[UUID]) -> dict[UUID, int]:
    """How many limits each of these tenants has. One query."""
    found = await repository.counts(session, tenant_ids)
    return {tenant_id: found.get(tenant_id, 0) for tenant_id in tenant_ids}


async def grant(
    session: AsyncSession, quota_id: UUID, spec: GrantSpec, *, by: str, idempotency_key: str | None = None
) -> GrantView:
    """A temporary raise. Repeated with the same idempotency key, the one made before.

    Raises InvalidRequestError, NotFoundError, or ConflictError when the quota has too many raises.
    """
    now = _now()
    starts_at = spec.starts_at or now
    check_more(spec.amount)
    check_span(starts_at, spec.expires_at, now)
    reason = check_text("reason", spec.reason)
    row = await _quota(session, quota_id, lock=True)
    if idempotency_key and (before := await repository.grant_by_idempotency_key(session, quota_id, idempotency_key)):
        asked = {name: (getattr(spec, name), getattr(before, name)) for name in ("amount", "expires_at")}
        asked["starts_at"] = (spec.starts_at or before.starts_at, before.starts_at)
        check_repeat(f"the raise {before.id}", {**asked, "reason": (reason, before.reason)})
        return grant_view(before)
    await check_room(session, row, row.soft, row.hard, more=spec.amount)
    added = await repository.add_grant(
        session,
        quota_id=row.id,
        tenant_id=row.tenant_id,
        amount=spec.amount,
        starts_at=starts_at,
        expires_at=spec.expires_at,
        reason=reason,
        granted_by=by,
        idempotency_key=idempotency_key,
    )
    assert added is not None  # the quota is locked, and no raise of it has this key
    return grant_view(added)


async def list_grants(
    session: AsyncSession, quota_id: UUID, *, after: str | None = None, limit: int = 50
) -> Page[GrantView]:
    """A limit's raises, oldest first, those that are over too. Two queries. Raises NotFoundError."""
    limit, key = checked(limit), decode_uuid(after)
    await _quota(session, quota_id)
    rows = await repository.grants(session, quota_id, after=key, limit=limit)
    return page(rows, limit, grant_view, lambda row: Cursor(row.created_at, str(row.id)))


async def end_grant(session: AsyncSession, quota_id: UUID, grant_id: UUID) -> GrantView:
    """End a raise now; one that is over stays as it was. Raises NotFoundError."""
    ended = await repository.end_grant(session, quota_id, grant_id, _now())
    if ended is None:
        raise NotFoundError(f"this quota has no raise {grant_id}", code="grant_not_found", param="grant_id")
    return grant_view(ended)


async def load_tenant_quotas(session: AsyncSession, tenant_id: UUID | str) -> TenantQuotas:
    """All a gateway needs to take leases for a tenant, read at one policy epoch or later. Three queries.

    Raises NotFoundError. What changes while it is read is announced with a later epoch: read it again then.
    """
    return (await _load(session, [await resolve_owner(session, UUID(str(tenant_id)))]))[0]


async def load_quotas(session: AsyncSession, *, after_id: str = "", limit: int = 500) -> list[TenantQuotas]:
    """The same for active tenants in id order, for a gateway's snapshot: call again with the last id. Three queries."""
    return await _load(session, await active_owners(session, after=UUID(after_id) if after_id else None, limit=limit))


async def _load(session: AsyncSession, owners: Sequence[Owner]) -> list[TenantQuotas]:
    if not owners:
        return []
    limits: dict[UUID, dict[UUID, tuple[Quota, list[Raise]]]] = {owner.tenant_id: {} for owner in owners}
    for row, raised in await repository.with_grants(session, limits.keys(), _now()):
        _, raises = limits[row.tenant_id].setdefault(row.id, (row, []))
        if raised is not None:
            raises.append(_raise(raised))
    prices = await price_service.prices_in_force(session)
    return [
        TenantQuotas(
            tenant_id=str(owner.tenant_id),
            tenant=owner.tenant,
            time_zone=owner.time_zone,
            limits=tuple(_limit(row, raises) for row, raises in limits[owner.tenant_id].values()),
            prices=prices,
            epoch=owner.epoch,
        )
        for owner in owners
    ]


def quota_view(row: Quota, raised: int = 0) -> QuotaView:
    """A row as operators see it."""
    return QuotaView(
        id=row.id,
        tenant=row.tenant,
        level=_level(row),
        project=row.project,
        key=row.key_identity,
        model=row.model or None,
        kind=QuotaKind(row.kind),
        soft=row.soft,
        hard=row.hard,
        raised=raised,
        away=Away(row.away),
        local=row.local,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def grant_view(row: Grant) -> GrantView:
    """A row as operators see it."""
    return GrantView(
        id=row.id,
        quota_id=row.quota_id,
        amount=row.amount,
        starts_at=row.starts_at,
        expires_at=row.expires_at,
        reason=row.reason,
        granted_by=row.granted_by,
        created_at=row.created_at,
    )


async def check_room(session: AsyncSession, row: Quota, soft: int | None, hard: int | None, *, more: int = 0) -> None:
    """A limit with all its raises stays a number that every part computes exactly; the caller has locked the row."""
    raises = await repository.not_over(session, row.id, _now())
    if more and len(raises) >= MOST_GRANTS:
        raise ConflictError(f"the quota has {MOST_GRANTS} raises that are not over: end some", code="too_many_grants")
    if max(soft or 0, hard or 0) + sum(each.amount for each in raises) + more > LARGEST_AMOUNT:
        raise InvalidRequestError(
            f"the limit with all its raises would exceed {LARGEST_AMOUNT}", param="amount" if more else "hard"
        )


async def lowest_hard(session: AsyncSession, quota_id: UUID, until: datetime) -> int | None:
    """The least that a limit's hard one is from now until then, its raises counted; None when it refuses nothing. Two
    queries. Raises NotFoundError.
    """
    row, now = await _quota(session, quota_id), _now()
    raises = [_raise(each) for each in await repository.not_over(session, quota_id, now)]
    return lowest(_limit(row, raises), now.timestamp(), until.timestamp())


async def _before(session: AsyncSession, owner: Owner, idempotency_key: str | None) -> Quota | None:
    """The limit that this idempotency key has made."""
    if not idempotency_key:
        return None
    return await repository.quota_by_idempotency_key(session, owner.tenant_id, idempotency_key)


async def _add_quota(
    session: AsyncSession, owner: Owner, spec: QuotaSpec, model: str, idempotency_key: str | None
) -> Quota | None:
    """The new limit; None when there is such a one, or the idempotency key has made one. Raises ConflictError."""
    if await repository.count_quotas(session, owner.tenant_id) >= MOST_QUOTAS:
        raise ConflictError(f"the tenant {owner.tenant} has {MOST_QUOTAS} limits: remove some", code="too_many_quotas")
    return await repository.add_quota(
        session,
        tenant_id=owner.tenant_id,
        tenant=owner.tenant,
        project_id=owner.project_id,
        project=spec.project,
        key_identity=owner.identity,
        model=model,
        kind=spec.kind,
        soft=spec.soft,
        hard=spec.hard,
        away=spec.away,
        local=spec.local,
        idempotency_key=idempotency_key,
    )


def _level(row: Quota) -> QuotaLevel:
    if row.key_identity is not None:
        return QuotaLevel.KEY
    return QuotaLevel.TENANT if row.project_id is None else QuotaLevel.PROJECT


def _limit(row: Quota, raises: list[Raise]) -> Limit:
    return Limit(
        quota_id=str(row.id),
        level=_level(row),
        scope_id=row.key_identity or str(row.project_id or row.tenant_id),
        model=row.model,
        kind=QuotaKind(row.kind),
        soft=row.soft,
        hard=row.hard,
        away=Away(row.away),
        local=row.local,
        raises=tuple(raises),
    )


def _raise(row: Grant) -> Raise:
    return Raise(amount=row.amount, starts_at=row.starts_at.timestamp(), expires_at=row.expires_at.timestamp())


async def _views(session: AsyncSession, rows: list[Quota]) -> list[QuotaView]:
    raised = await repository.raised(session, [row.id for row in rows], _now())
    return [quota_view(row, raised.get(row.id, 0)) for row in rows]


async def _quota(session: AsyncSession, quota_id: UUID, *, lock: bool = False) -> Quota:
    row = await repository.quota(session, quota_id, lock=lock)
    if row is None:
        raise NotFoundError(f"there is no quota {quota_id}", code="quota_not_found", param="quota_id")
    return row


def _now() -> datetime:
    return datetime.now(UTC)
