"""Queries of the usage ledger. Layer: service. SQL only; it inserts and reads, it never changes a row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, delete, select, text, tuple_
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.ledger.models import ClaimedAttempt, HeldUsage, RefusedUsage, UsageEntry
from controlplane.ledger.schemas import RefusedRecord, SumDifference, UsageLine
from controlplane.ledger.spans import start_of
from controlplane.paging import Cursor
from dataplane.protocol import UsageBasis, UsageRecord

_TEXT = ("attempt_id", "request_id", "tenant", "project", "key_id", "pool", "model", "replica", "finish", "basis")
_COUNTS = ("boot_epoch", "prompt_tokens", "cached_tokens", "output_tokens")
_AMOUNTS = ("kv_block_seconds", "device_seconds")
_TIMES = ("started_at", "finished_at")
_COST = ("cost",)

_COLUMNS = [*_TEXT, *_COUNTS, *_AMOUNTS, *_COST, *_TIMES]
_ARRAYS = ", ".join(
    [f"CAST(:{name} AS text[])" for name in _TEXT]
    + [f"CAST(:{name} AS bigint[])" for name in _COUNTS]
    + [f"CAST(:{name} AS double precision[])" for name in _AMOUNTS]
    + [f"CAST(:{name} AS bigint[])" for name in _COST]
    + [f"CAST(:{name} AS double precision[])" for name in _TIMES]
)
_VALUES = ", ".join([*_TEXT, *_COUNTS, *_AMOUNTS, *_COST, *(f"to_timestamp({name}) AS {name}" for name in _TIMES)])
_KEYS = "day, tenant, project, key_id, model, pool, basis"
_SUMS = ("attempts", "prompt_tokens", "cached_tokens", "output_tokens", *_AMOUNTS, "cost", "unpriced_attempts")
_DAY = "(finished_at AT TIME ZONE 'UTC')::date AS day"
_SUMMED = (
    "count(*) AS attempts, sum(prompt_tokens) AS prompt_tokens, sum(cached_tokens) AS cached_tokens, "
    "sum(output_tokens) AS output_tokens, "
    + ", ".join(f"sum(round({name}::numeric, 6)) AS {name}" for name in _AMOUNTS)
    + ", coalesce(sum(cost), 0)::bigint AS cost, count(*) - count(cost) AS unpriced_attempts"
)
# One statement claims, stores and sums, so that no crash can come between. Claims and sums are taken in key order, and
# sums after all claims: writers wait for each other, they do not deadlock. Who has the claim lets go of what was held
# of the attempt, and nobody waits for a held row before its claims are taken.
_INSERT = text(
    f"""
WITH incoming AS MATERIALIZED (
  SELECT {_VALUES} FROM unnest({_ARRAYS}) AS u({", ".join(_COLUMNS)})
), claimed AS (
  INSERT INTO usage_attempts (attempt_id, by_gateway) SELECT attempt_id, :by_gateway FROM incoming
  ON CONFLICT (attempt_id) DO NOTHING RETURNING attempt_id
), released AS (
  DELETE FROM usage_held AS h USING claimed AS c WHERE h.attempt_id = c.attempt_id
), stored AS (
  INSERT INTO usage_ledger ({", ".join(_COLUMNS)})
  SELECT {", ".join(_COLUMNS)} FROM incoming JOIN claimed USING (attempt_id)
  RETURNING *
), summed AS (
  INSERT INTO usage_daily AS d ({_KEYS}, {", ".join(_SUMS)})
  SELECT {_DAY}, {_KEYS.removeprefix("day, ")}, {_SUMMED} FROM stored
  GROUP BY {_KEYS} ORDER BY {_KEYS}
  ON CONFLICT ({_KEYS}) DO UPDATE SET {", ".join(f"{name} = d.{name} + excluded.{name}" for name in _SUMS)}
)
SELECT attempt_id FROM claimed
"""  # noqa: S608  # made of the constants above
)


class Costed(NamedTuple):
    """A record and what it cost; None when no price was in force."""

    record: UsageRecord
    cost: int | None


async def insert_records(session: AsyncSession, records: Sequence[Costed], *, by_gateway: bool) -> set[str]:
    """Insert the attempts not stored yet; returns the ids of those. `records` hold each attempt once."""
    return set(await session.scalars(_INSERT, {**_columns(records), "by_gateway": by_gateway}))


_HOLD = text(
    f"""
WITH incoming AS MATERIALIZED (
  SELECT {_VALUES} FROM unnest({_ARRAYS}) AS u({", ".join(_COLUMNS)})
)
INSERT INTO usage_held ({", ".join(_COLUMNS)}, held_at)
SELECT {", ".join(_COLUMNS)}, clock_timestamp() FROM incoming AS i
WHERE NOT EXISTS (SELECT FROM usage_attempts AS a WHERE a.attempt_id = i.attempt_id)
ON CONFLICT (attempt_id) DO NOTHING RETURNING attempt_id
"""  # noqa: S608  # made of the constants above
)


async def hold(session: AsyncSession, records: Sequence[Costed]) -> set[str]:
    """Hold the attempts neither stored nor held yet; returns the ids of those. `records` hold each attempt once."""
    return set(await session.scalars(_HOLD, _columns(records)))


def _columns(records: Sequence[Costed]) -> dict[str, Any]:
    ordered = sorted(records, key=lambda one: one.record.attempt_id)
    columns = {name: [getattr(one.record, name) for one in ordered] for name in _COLUMNS if name not in _COST}
    columns["basis"] = [one.record.basis.value for one in ordered]
    columns["cost"] = [one.cost for one in ordered]
    return columns


SETTLING_LOCK = 0x6865_6C64
"""Key of the advisory lock ("held")."""


async def try_settling(session: AsyncSession) -> bool:
    """Whether this transaction is the one that may settle held attempts now."""
    return bool(await session.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": SETTLING_LOCK}))


_WAITING = text(
    "SELECT replica, extract(epoch FROM min(held_at)) FROM usage_held GROUP BY replica ORDER BY 2 LIMIT :most"
)


async def held_replicas(session: AsyncSession, most: int) -> dict[str, float]:
    """Replicas of held attempts with the time (Unix) since when one is held; those that wait longest."""
    return {row[0]: float(row[1]) for row in await session.execute(_WAITING, {"most": most})}


_DUE = text(
    f"""
SELECT {", ".join(f"h.{name}" for name in (*_TEXT, *_COUNTS, *_AMOUNTS, *_COST))},
  {", ".join(f"extract(epoch FROM h.{name})::double precision AS {name}" for name in _TIMES)}
FROM unnest(CAST(:replicas AS text[]), CAST(:before AS double precision[])) AS u(replica, before)
JOIN usage_held AS h ON h.replica = u.replica AND h.held_at < to_timestamp(u.before)
ORDER BY h.held_at LIMIT :most
"""  # noqa: S608  # made of the constants above
)


async def due(session: AsyncSession, before: Mapping[str, float], most: int) -> list[Costed]:
    """At most `most` attempts held since before their replica's time, those that wait longest."""
    values = {"replicas": list(before), "before": list(before.values()), "most": most}
    rows = (await session.execute(_DUE, values)).mappings()
    return [_costed(dict(row)) for row in rows]


def _costed(row: dict[str, Any]) -> Costed:
    cost = row.pop("cost")
    return Costed(UsageRecord(**{**row, "basis": UsageBasis(row["basis"])}), cost)


async def release(session: AsyncSession, attempts: Sequence[str]) -> None:
    """Let go of held attempts that are stored."""
    await session.execute(delete(HeldUsage).where(HeldUsage.attempt_id.in_(attempts)))


async def stored_by_gateway(session: AsyncSession, attempts: Sequence[str]) -> set[str]:
    """Those of `attempts` whose row is what a gateway counted."""
    query = select(ClaimedAttempt.attempt_id).where(ClaimedAttempt.attempt_id.in_(attempts), ClaimedAttempt.by_gateway)
    return set(await session.scalars(query))


class HeldNow(NamedTuple):
    """How many attempts are held, and when the one that ended first did (Unix seconds)."""

    attempts: int
    oldest: float | None


async def held_now(session: AsyncSession) -> HeldNow:
    found = (await session.execute(text("SELECT count(*), extract(epoch FROM min(finished_at)) FROM usage_held"))).one()
    return HeldNow(int(found[0]), None if found[1] is None else float(found[1]))


async def insert_refused(session: AsyncSession, refused: Sequence[RefusedRecord]) -> int:
    """Keep what cannot be billed, each once; returns how many were not kept before."""
    rows = {}
    for one in refused:
        digest = hashlib.sha256(one.packed).digest()
        rows[digest] = {
            "digest": digest,
            "replica": one.sender.replace("\x00", "")[:200],
            "reason": one.reason.replace("\x00", "")[:1000],
            "record": one.packed,
        }
    statement = upsert(RefusedUsage).values([rows[digest] for digest in sorted(rows)])
    statement = statement.on_conflict_do_nothing(index_elements=[RefusedUsage.digest])
    return len((await session.scalars(statement.returning(RefusedUsage.digest))).all())


async def lines(
    session: AsyncSession,
    *,
    since: datetime | None,
    until: datetime | None,
    tenant: str | None,
    after: Cursor | None,
    limit: int,
    oldest_first: bool = False,
) -> list[UsageLine]:
    """At most `limit` attempts that finished in [since, until), those beyond `after` in the order asked for.

    `after`'s time is also said alone: the planner prunes partitions by it, not by the pair.
    """
    at, attempt = UsageEntry.finished_at, UsageEntry.attempt_id
    query: Select[*tuple[Any, ...]] = select(*(getattr(UsageEntry, name) for name in _COLUMNS))
    if since is not None:
        query = query.where(at >= since)
    if until is not None:
        query = query.where(at < until)
    if tenant is not None:
        query = query.where(UsageEntry.tenant == tenant)
    if after is not None and oldest_first:
        query = query.where(at >= after.at, tuple_(at, attempt) > tuple_(after.at, after.id))
    elif after is not None:
        query = query.where(at <= after.at, tuple_(at, attempt) < tuple_(after.at, after.id))
    order = (at, attempt) if oldest_first else (at.desc(), attempt.desc())
    rows = (await session.execute(query.order_by(*order).limit(limit))).mappings()
    return [UsageLine(**_with_uncached(dict(row))) for row in rows]


def _with_uncached(row: dict[str, Any]) -> dict[str, Any]:
    uncached = row["prompt_tokens"] - row["cached_tokens"]
    return {**row, "basis": UsageBasis(row["basis"]), "uncached_tokens": uncached}


async def estimated_rows(session: AsyncSession) -> int:
    """The ledger's size by the planner's statistics: cheap at any size, exact at none."""
    query = text(
        "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_inherits "
        "JOIN pg_class AS c ON c.oid = inhrelid WHERE inhparent = 'usage_ledger'::regclass"
    )
    return int(await session.scalar(query) or 0)


_DIFFERENCES = text(
    f"""
WITH ledger AS (
  SELECT {_DAY}, {_KEYS.removeprefix("day, ")}, {_SUMMED} FROM usage_ledger
  WHERE finished_at >= :since AND finished_at < :until GROUP BY {_KEYS}
), daily AS (
  SELECT * FROM usage_daily WHERE day >= :first AND day < :end
)
SELECT day, tenant, project, key_id, model, pool, basis,
  coalesce(l.attempts, 0) AS ledger_attempts, coalesce(d.attempts, 0) AS daily_attempts,
  coalesce(l.prompt_tokens + l.output_tokens, 0)::bigint AS ledger_tokens,
  coalesce(d.prompt_tokens + d.output_tokens, 0) AS daily_tokens
FROM ledger AS l FULL JOIN daily AS d USING ({_KEYS})
WHERE ({", ".join(f"l.{name}" for name in _SUMS)}) IS DISTINCT FROM ({", ".join(f"d.{name}" for name in _SUMS)})
ORDER BY {_KEYS} LIMIT :most
"""  # noqa: S608  # made of the constants above
)


async def differences(session: AsyncSession, first: date, end: date, most: int) -> list[SumDifference]:
    """At most `most` sums of the days [first, end) that are not those of the ledger's rows."""
    values = {"first": first, "end": end, "since": start_of(first), "until": start_of(end), "most": most}
    return [SumDifference(**row) for row in (await session.execute(_DIFFERENCES, values)).mappings()]


# Materialised, because a plain sub-query with a LIMIT may be run again per row, and lock ever more.
_DELETE_REFUSED = text(
    """
WITH old AS MATERIALIZED (
  SELECT digest FROM usage_refused WHERE refused_at < now() - make_interval(secs => :age_s)
  ORDER BY digest LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM usage_refused AS u USING old WHERE u.digest = old.digest RETURNING u.digest
"""
)


async def delete_refused(session: AsyncSession, older_than_s: float, most: int) -> int:
    """Delete at most `most` refused records older than `older_than_s`; returns how many went."""
    gone = await session.scalars(_DELETE_REFUSED, {"age_s": older_than_s, "most": most})
    return len(gone.all())


_DELETE_CLAIMS = text(
    """
WITH old AS MATERIALIZED (
  SELECT attempt_id FROM usage_attempts WHERE claimed_at < now() - make_interval(secs => :age_s)
  ORDER BY attempt_id LIMIT :most FOR UPDATE SKIP LOCKED
)
DELETE FROM usage_attempts AS a USING old WHERE a.attempt_id = old.attempt_id RETURNING a.attempt_id
"""
)


async def delete_claims(session: AsyncSession, older_than_s: float, most: int) -> int:
    """Delete at most `most` claims older than `older_than_s`; returns how many went."""
    gone = await session.scalars(_DELETE_CLAIMS, {"age_s": older_than_s, "most": most})
    return len(gone.all())
