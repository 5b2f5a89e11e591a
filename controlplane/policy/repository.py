"""Queries over the policy's history. Layer: service. Only queries: no rules, no commit."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.policy.models import PolicyChange

_MISSED = text(
    """
SELECT u.epoch, (
  SELECT extract(epoch FROM clock_timestamp() - p.at) FROM policy_epochs p
  WHERE p.epoch > u.epoch AND p.epoch <= :current ORDER BY p.epoch LIMIT 1)
FROM unnest(CAST(:epochs AS bigint[])) AS u(epoch)
"""
)
_RESTORES = text("SELECT set_config('tidegate.restores', :change, true)")
_DELETE_CHANGES = text(
    """
WITH old AS MATERIALIZED (
  SELECT id FROM policy_changes
  WHERE at < now() - make_interval(secs => :age_s) OR id <= (SELECT max(id) FROM policy_changes) - :kept
  ORDER BY id LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM policy_changes AS c USING old WHERE c.id = old.id RETURNING c.id
"""
)
_DELETE_EPOCHS = text(
    """
WITH old AS MATERIALIZED (
  SELECT epoch FROM policy_epochs WHERE epoch <= (SELECT max(epoch) FROM policy_epochs) - :kept
  ORDER BY epoch LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM policy_epochs AS p USING old WHERE p.epoch = old.epoch RETURNING p.epoch
"""
)


async def missed_s(session: AsyncSession, epochs: Collection[int], current: int) -> dict[int, float | None]:
    """Seconds since the first change after each of `epochs`; None where nobody remembers when it was."""
    rows = await session.execute(_MISSED, {"epochs": sorted(set(epochs)), "current": current})
    return {epoch: None if age is None else max(0.0, float(age)) for epoch, age in rows}


async def changes(
    session: AsyncSession, *, tenant: str | None, object_: str | None, after: int | None, limit: int
) -> list[PolicyChange]:
    """Newest first, one more than `limit`; those before the one of id `after`."""
    query = select(PolicyChange).order_by(PolicyChange.id.desc()).limit(limit + 1)
    if tenant is not None:
        query = query.where(PolicyChange.tenant == tenant)
    if object_ is not None:
        query = query.where(PolicyChange.object == object_)
    if after is not None:
        query = query.where(PolicyChange.id < after)
    return list(await session.scalars(query))


async def change(session: AsyncSession, change_id: int) -> PolicyChange | None:
    return await session.get(PolicyChange, change_id, populate_existing=True)


async def later(session: AsyncSession, change: PolicyChange) -> list[PolicyChange]:
    """The first changes of the same row after `change`, oldest first."""
    query = (
        select(PolicyChange)
        .where(PolicyChange.object == change.object, PolicyChange.row_id == change.row_id, PolicyChange.id > change.id)
        .order_by(PolicyChange.id)
        .limit(10)
    )
    return list(await session.scalars(query))


async def restoring(session: AsyncSession, change: PolicyChange) -> PolicyChange | None:
    """The last change, of another row too, that took `change` back."""
    query = select(PolicyChange).where(PolicyChange.restores == change.id, PolicyChange.id > change.id)
    return (await session.scalars(query.order_by(PolicyChange.id.desc()).limit(1))).one_or_none()


async def say_restores(session: AsyncSession, change_id: int | None) -> None:
    """What this transaction changes from now on takes back the change `change_id`; None ends that."""
    await session.execute(_RESTORES, {"change": "" if change_id is None else str(change_id)})


async def delete_old(session: AsyncSession, *, age_s: float, kept: int, most: int) -> int:
    """Delete at most `most` changes older than `age_s` or beyond the last `kept`; returns how many went."""
    return len((await session.scalars(_DELETE_CHANGES, {"age_s": age_s, "kept": kept, "most": most})).all())


async def delete_epochs(session: AsyncSession, *, kept: int, most: int) -> int:
    """Delete at most `most` times of epochs beyond the last `kept`; returns how many went."""
    return len((await session.scalars(_DELETE_EPOCHS, {"kept": kept, "most": most})).all())
