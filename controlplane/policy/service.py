"""The policy as a whole: who has which epoch in force, what changed, and taking one change back.

Layer: service. Every function takes the caller's session and never commits. The history is written by triggers in the
transaction of each change; taking one back is a change like any other, made by the domain that owns the row, and so
reaches every gateway and can be taken back itself.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.errors import ConflictError, InvalidRequestError, NotFoundError
from controlplane.fleet import service as fleet
from controlplane.paging import Cursor, Page, checked, decode, page
from controlplane.policy import repository
from controlplane.policy.models import PolicyChange
from controlplane.policy.skew import SKEWED, judge
from controlplane.policy.views import ChangeView, HolderKind, HolderView, PolicyObject, PolicyView
from controlplane.quotas import restoring
from controlplane.slo import service as slos
from controlplane.telemetry.reporters import gateways
from controlplane.tenants import service as tenants

KEPT_S = 396 * 86_400
MOST_KEPT = 100_000
"""Changes kept, and times of epochs."""

LARGEST_ID = 2**63 - 1

Row = dict[str, Any]
Restore = Callable[[AsyncSession, Row | None, Row | None], Awaitable[None]]

RESTORE: dict[PolicyObject, Restore] = {
    PolicyObject.TENANTS: tenants.restore_tenant,
    PolicyObject.QUOTAS: restoring.restore_quota,
    PolicyObject.GRANTS: restoring.restore_grant,
    PolicyObject.PRICES: restoring.restore_price,
    PolicyObject.SLOS: slos.restore_slo,
}


async def policy(
    session: AsyncSession, redis: Redis, *, stale_after_s: float, clock: Callable[[], float] = time.time
) -> PolicyView:
    """The present epoch and that of every gateway and replica. Four queries."""
    current, changed_at = await tenants.policy_state(session)
    held = [(HolderKind.GATEWAY, one.gateway, one.policy_epoch, one.age_s) for one in await gateways(session)]
    replicas = await fleet.list_replicas(session, redis, clock())
    held += [(HolderKind.REPLICA, one.replica, one.policy_epoch, one.age_s or 0.0) for one in replicas]
    missed = await repository.missed_s(session, [epoch for _, _, epoch, _ in held], current)
    holders = []
    for kind, name, epoch, age_s in held:
        verdict = judge(epoch, current, silent_s=age_s, stale_after_s=stale_after_s, missed_s=missed[epoch])
        holder = HolderView(
            kind=kind,
            name=name,
            epoch=epoch,
            state=verdict.state,
            behind=max(0, current - epoch),
            for_s=verdict.for_s,
            report_age_s=age_s,
        )
        holders.append(holder)
    skewed = sum(one.state in SKEWED for one in holders)
    return PolicyView(epoch=current, changed_at=changed_at, skewed=skewed, holders=holders)


async def list_changes(
    session: AsyncSession,
    *,
    tenant: str | None = None,
    object_: PolicyObject | None = None,
    after: str | None = None,
    limit: int = 50,
) -> Page[ChangeView]:
    """Changes, newest first. One query. Raises InvalidRequestError."""
    limit, last = checked(limit), _number(decode(after))
    rows = await repository.changes(session, tenant=tenant, object_=object_, after=last, limit=limit)
    return page(rows, limit, change_view, lambda row: Cursor(row.at, str(row.id)))


async def get_change(session: AsyncSession, change_id: int) -> ChangeView:
    """Raises NotFoundError."""
    return change_view(await _change(session, change_id))


async def roll_back(session: AsyncSession, change_id: int) -> ChangeView:
    """Take one change back: a new change that restores what was before it. Answers that new change.

    Raises NotFoundError, or ConflictError when the row has changed since, when what was before cannot come again, or
    when nothing is left to take back. Nothing is changed then.
    """
    row = await _change(session, change_id)
    _refuse_changed(row, await repository.later(session, row))
    async with session.begin_nested():
        await repository.say_restores(session, row.id)
        try:
            await RESTORE[PolicyObject(row.object)](session, row.before, row.after)
        except NotFoundError as error:
            raise _gone(error) from error
        except IntegrityError as error:
            raise ConflictError("what it belonged to is gone, or has another by now", code="not_reversible") from error
        await repository.say_restores(session, None)
        since = await repository.later(session, row)  # whoever changed it meanwhile has committed: the row was locked
        _refuse_changed(row, [one for one in since if one.restores != row.id])
        made = since[-1] if since else await repository.restoring(session, row)
        if made is None:
            raise ConflictError("there is nothing left to take back", code="nothing_to_restore")
    return change_view(made)


async def forget(session: AsyncSession, *, limit: int) -> int:
    """Delete at most `limit` rows of each kind that are beyond what is kept; returns the larger number."""
    changes = await repository.delete_old(session, age_s=KEPT_S, kept=MOST_KEPT, most=limit)
    return max(changes, await repository.delete_epochs(session, kept=MOST_KEPT, most=limit))


def change_view(row: PolicyChange) -> ChangeView:
    """A row as operators see it."""
    return ChangeView(
        id=row.id,
        epoch=row.epoch,
        at=row.at,
        who=row.who,
        object=PolicyObject(row.object),
        row_id=row.row_id,
        tenant=row.tenant,
        before=row.before,
        after=row.after,
        restores=row.restores,
    )


def _number(cursor: Cursor | None) -> int | None:
    """The id that a cursor of this list holds. Raises InvalidRequestError."""
    if cursor is None:
        return None
    if not (cursor.id.isascii() and cursor.id.isdecimal() and len(cursor.id) <= 18):
        raise InvalidRequestError("the cursor is not one of this list", param="after")
    return int(cursor.id)


async def _change(session: AsyncSession, change_id: int) -> PolicyChange:
    row = await repository.change(session, change_id) if change_id <= LARGEST_ID else None
    if row is None:
        raise NotFoundError(f"there is no change {change_id}", code="change_not_found", param="change_id")
    return row


def _refuse_changed(row: PolicyChange, since: list[PolicyChange]) -> None:
    if since:
        first = since[0]
        raise ConflictError(
            f"it has changed since: {first.who} made change {first.id} at {first.at:%Y-%m-%d %H:%M:%S} UTC; take that "
            "back first",
            code="changed_since",
        )


def _gone(error: NotFoundError) -> ConflictError:
    return ConflictError(f"it cannot be restored: {error.message}", code="not_reversible")
