"""Queries of pools, replicas and their events.

Layer: service. SQL only: whoever calls decides what the rows mean. Replicas are locked and written in id order,
so that two control planes taking in reports at once cannot deadlock (F39).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, func, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.fleet.models import Pool, Replica, ReplicaEvent
from controlplane.fleet.registration import ReplicaEventDraft, ReplicaFacts
from controlplane.fleet.schemas import PoolRoute
from dataplane.protocol import CoreReady, ReplicaState, encode

NATIVE = "native"
"""The backend whose replicas tell what each attempt used."""

_decode_ready = msgspec.msgpack.Decoder(CoreReady).decode


def epoch_of(column: ColumnElement[Any] | Any) -> ColumnElement[float]:
    """A timestamp column as Unix seconds."""
    return func.date_part("epoch", column)


_FACTS = (
    Replica.id,
    Replica.pool,
    Replica.model,
    Replica.url,
    Replica.state,
    Replica.state_reason,
    Replica.drain_wanted,
    Replica.boot_epoch,
    Replica.core_epoch,
    Replica.sequence,
    Replica.core_restarts,
    Replica.policy_epoch,
    epoch_of(Replica.started_at).label("started_at"),
    Replica.ready,
    epoch_of(Replica.usage_told_until).label("usage_told_until"),
)


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """A replica's times by the database's clock, in Unix seconds."""

    state_since: float
    last_report_at: float


def _facts(row: Any) -> ReplicaFacts:
    return ReplicaFacts(
        replica=row.id,
        pool=row.pool,
        model=row.model,
        url=row.url,
        state=ReplicaState(row.state),
        state_reason=row.state_reason,
        drain_wanted=row.drain_wanted,
        boot_epoch=row.boot_epoch,
        core_epoch=row.core_epoch,
        sequence=row.sequence,
        core_restarts=row.core_restarts,
        policy_epoch=row.policy_epoch,
        started_at=row.started_at,
        ready=None if row.ready is None else _decode_ready(row.ready),
        usage_told_until=row.usage_told_until,
    )


async def lock_replicas(session: AsyncSession, ids: Sequence[str]) -> dict[str, ReplicaFacts]:
    """The rows of `ids` that exist, locked until the transaction ends."""
    query = select(*_FACTS).where(Replica.id.in_(ids)).order_by(Replica.id).with_for_update()
    return {row.id: _facts(row) for row in await session.execute(query)}


async def served_models(session: AsyncSession) -> set[str]:
    """What pools with a READY replica serve."""
    query = select(Pool.model).join(Replica, Replica.pool == Pool.name).where(Replica.state == ReplicaState.READY)
    return set(await session.scalars(query.distinct()))


async def known_pools(session: AsyncSession, names: Sequence[str]) -> set[str]:
    return set(await session.scalars(select(Pool.name).where(Pool.name.in_(names))))


_UPSERT_REPLICAS = text(
    """
INSERT INTO replicas AS r (id, pool, model, url, state, state_reason, boot_epoch, core_epoch, sequence, core_restarts,
                           policy_epoch, started_at, ready, usage_told_until, last_report_at, state_since)
SELECT u.id, u.pool, u.model, u.url, u.state, u.state_reason, u.boot_epoch, u.core_epoch, u.sequence, u.core_restarts,
       u.policy_epoch, to_timestamp(u.started_at), u.ready, to_timestamp(u.usage_told_until), now(), now()
FROM unnest(CAST(:id AS text[]), CAST(:pool AS text[]), CAST(:model AS text[]), CAST(:url AS text[]),
            CAST(:state AS text[]), CAST(:state_reason AS text[]), CAST(:boot_epoch AS bigint[]),
            CAST(:core_epoch AS bigint[]), CAST(:sequence AS bigint[]), CAST(:core_restarts AS int[]),
            CAST(:policy_epoch AS bigint[]), CAST(:started_at AS double precision[]), CAST(:ready AS bytea[]),
            CAST(:usage_told_until AS double precision[]))
  AS u(id, pool, model, url, state, state_reason, boot_epoch, core_epoch, sequence, core_restarts, policy_epoch,
       started_at, ready, usage_told_until)
ON CONFLICT (id) DO UPDATE SET
  pool = excluded.pool, model = excluded.model, url = excluded.url, state = excluded.state,
  state_reason = excluded.state_reason, boot_epoch = excluded.boot_epoch, core_epoch = excluded.core_epoch,
  sequence = excluded.sequence, core_restarts = excluded.core_restarts, policy_epoch = excluded.policy_epoch,
  started_at = excluded.started_at, ready = excluded.ready, usage_told_until = excluded.usage_told_until,
  last_report_at = excluded.last_report_at,
  state_since = CASE WHEN r.state = excluded.state THEN r.state_since ELSE excluded.state_since END
WHERE (excluded.boot_epoch, excluded.sequence) > (r.boot_epoch, r.sequence)
RETURNING r.id, r.xmax = 0 AS inserted
"""
)


async def write_replicas(session: AsyncSession, facts: Sequence[ReplicaFacts]) -> dict[str, bool]:
    """Insert or replace the rows, unless a newer report was stored meanwhile.

    Returns the ids written, and of each whether its row is new (no transaction had ever updated it: xmax is 0).
    """
    rows = sorted(facts, key=lambda one: one.replica)
    columns = {
        "id": [row.replica for row in rows],
        "pool": [row.pool for row in rows],
        "model": [row.model for row in rows],
        "url": [row.url for row in rows],
        "state": [row.state.value for row in rows],
        "state_reason": [row.state_reason for row in rows],
        "boot_epoch": [row.boot_epoch for row in rows],
        "core_epoch": [row.core_epoch for row in rows],
        "sequence": [row.sequence for row in rows],
        "core_restarts": [row.core_restarts for row in rows],
        "policy_epoch": [row.policy_epoch for row in rows],
        "started_at": [row.started_at for row in rows],
        "ready": [None if row.ready is None else encode(row.ready) for row in rows],
        "usage_told_until": [row.usage_told_until for row in rows],
    }
    written = await session.execute(_UPSERT_REPLICAS, columns)
    return {row.id: row.inserted for row in written}


async def add_events(session: AsyncSession, events: Sequence[ReplicaEventDraft]) -> None:
    if events:
        await session.execute(insert(ReplicaEvent), [msgspec.structs.asdict(event) for event in events])


async def set_drain_wanted(session: AsyncSession, replica: str, wanted: bool) -> None:
    await session.execute(update(Replica).where(Replica.id == replica).values(drain_wanted=wanted))


async def move_state(
    session: AsyncSession, replica: str, *, before: ReplicaState, after: ReplicaState, reason: str, sequence: int
) -> bool:
    """Change the state if the row is still as it was judged; False when somebody was faster or it reported."""
    moved = await session.scalars(
        update(Replica)
        .where(Replica.id == replica, Replica.state == before.value, Replica.sequence == sequence)
        .values(state=after.value, state_reason=reason, state_since=func.now())
        .returning(Replica.id)
    )
    return moved.first() is not None


async def database_clock(session: AsyncSession) -> float:
    """Unix seconds by the database's clock, the one `last_report_at` is written by."""
    return float(await session.scalar(select(epoch_of(func.clock_timestamp()))) or 0.0)


_WITH_TIMES = select(
    *_FACTS,
    epoch_of(Replica.state_since).label("state_since"),
    epoch_of(Replica.last_report_at).label("last_report_at"),
)


async def replicas(session: AsyncSession) -> list[tuple[ReplicaFacts, ReplicaTimes]]:
    """Every replica in pool and id order."""
    rows = await session.execute(_WITH_TIMES.order_by(Replica.pool, Replica.id))
    return [(_facts(row), ReplicaTimes(row.state_since, row.last_report_at)) for row in rows]


async def replicas_not_lost(session: AsyncSession) -> list[tuple[ReplicaFacts, ReplicaTimes]]:
    """Every replica that may still fall silent, in the order rows are locked in."""
    rows = await session.execute(_WITH_TIMES.where(Replica.state != ReplicaState.LOST.value).order_by(Replica.id))
    return [(_facts(row), ReplicaTimes(row.state_since, row.last_report_at)) for row in rows]


async def usage_told_until(session: AsyncSession, ids: Sequence[str]) -> dict[str, float]:
    """When each of `ids` last had told everything; 0 for never. Only replicas of backends that tell their usage."""
    query = select(Replica.id, epoch_of(Replica.usage_told_until)).join(Pool, Pool.name == Replica.pool)
    rows = await session.execute(query.where(Replica.id.in_(ids), Pool.backend == NATIVE))
    return {row[0]: row[1] or 0.0 for row in rows}


async def oldest_usage_told(session: AsyncSession) -> float | None:
    """The least of when each replica last had told everything, those LOST left out; who never has counts as 0."""
    oldest = func.min(func.coalesce(epoch_of(Replica.usage_told_until), 0.0))
    query = select(oldest).join(Pool, Pool.name == Replica.pool)
    found: float | None = await session.scalar(query.where(Replica.state != ReplicaState.LOST, Pool.backend == NATIVE))
    return found


async def put_pool(session: AsyncSession, name: str, model: str, backend: str) -> None:
    """Insert the pool, or change its model and backend; an unchanged pool notifies nobody."""
    statement = upsert(Pool).values(name=name, model=model, backend=backend)
    changed = (Pool.model != statement.excluded.model) | (Pool.backend != statement.excluded.backend)
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[Pool.name],
            set_={"model": statement.excluded.model, "backend": statement.excluded.backend},
            where=changed,
        )
    )


async def set_pool_size(session: AsyncSession, name: str, slots: int, tokens: int) -> None:
    """Say what each replica of a pool holds, 0 for what the replica says."""
    await session.execute(update(Pool).where(Pool.name == name).values(replica_slots=slots, replica_tokens=tokens))


_POOLS = select(
    Pool.name,
    Pool.model,
    Pool.backend,
    epoch_of(Pool.created_at).label("created_at"),
    Pool.replica_slots,
    Pool.replica_tokens,
).order_by(Pool.name)


async def pools(session: AsyncSession) -> list[PoolRoute]:
    return [PoolRoute(**row._mapping) for row in await session.execute(_POOLS)]


async def lock_pool(session: AsyncSession, name: str) -> PoolRoute | None:
    """The pool of that name, locked until the transaction ends."""
    row = (await session.execute(_POOLS.where(Pool.name == name).with_for_update())).one_or_none()
    return None if row is None else PoolRoute(**row._mapping)


# The CTEs are materialised because a plain sub-query with a LIMIT may be run again per row, and lock ever more.
_DELETE_EVENTS = text(
    """
WITH old AS MATERIALIZED (
  SELECT id FROM replica_events WHERE at < now() - make_interval(secs => :age_s)
  ORDER BY id LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM replica_events AS e USING old WHERE e.id = old.id RETURNING e.id
"""
)
_DELETE_LOST = text(
    """
WITH old AS MATERIALIZED (
  SELECT id FROM replicas WHERE state = 'lost' AND state_since < now() - make_interval(secs => :age_s)
  ORDER BY id LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM replicas AS r USING old WHERE r.id = old.id RETURNING r.id
"""
)


async def delete_events(session: AsyncSession, older_than_s: float, most: int) -> int:
    """Delete at most `most` events older than `older_than_s`; returns how many went."""
    gone = await session.scalars(_DELETE_EVENTS, {"age_s": older_than_s, "most": most})
    return len(gone.all())


async def delete_lost(session: AsyncSession, older_than_s: float, most: int) -> int:
    """Delete at most `most` replicas LOST for longer than `older_than_s`, with their events; returns how many went."""
    gone = await session.scalars(_DELETE_LOST, {"age_s": older_than_s, "most": most})
    return len(gone.all())
