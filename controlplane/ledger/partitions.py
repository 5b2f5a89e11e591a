"""The ledger's partitions: one a day (UTC), made ahead, dropped when past their time.

Layer: service. The catalogue of Postgres is the only record of what exists. One transaction works on partitions at a
time (an advisory lock that ends with it), so a job that runs twice or in two workers finds nothing to do. Rows of a day
that has no partition lie in the default one; they are moved when their day's is made, and are never deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.ledger.spans import start_of

PREFIX = "usage_ledger_p"
DEFAULT = "usage_ledger_default"
LOCK = 0x7573_6167
"""Key of the advisory lock ("usag")."""
LOCK_TIMEOUT = "2s"
"""Longest that readers and writers queue behind a partition that cannot be had now; the next run tries again."""
MOST_MOVED = 200_000
"""Rows of one day that may leave the default partition; of a day with more, all stay where they are."""
_DAY = timedelta(days=1)


class Changed(NamedTuple):
    """What one run did."""

    made: list[date]
    dropped: list[date]
    left_in_default: int
    """Rows in the default partition for which no partition could be made."""


async def try_lock(session: AsyncSession) -> bool:
    """Whether this transaction is the one that may change partitions now."""
    await session.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
    return bool(await session.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": LOCK}))


async def days(session: AsyncSession) -> list[date]:
    """The days that have a partition of their own, in order."""
    names = await session.scalars(
        text("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_ledger'::regclass")
    )
    return sorted(_day_of(name) for name in names if name.startswith(PREFIX))


async def keep(session: AsyncSession, *, today: date, ahead: int, kept: int, most: int) -> Changed:
    """Make the partitions of yesterday to `ahead` days from `today` and of the days with rows in the default one, and
    drop those that ended more than `kept` days ago with their sums: at most `most` of each. The caller holds the lock.
    """
    existing = await days(session)
    strays = await _days_in_default(session)
    oldest = today - kept * _DAY
    wanted = {today + n * _DAY for n in range(-1, ahead + 1)} | set(strays)
    missing = sorted(wanted - set(existing))[:most]
    made = [day for day in missing if strays.get(day, 0) <= MOST_MOVED]
    await _make(session, made, [day for day in made if day in strays])
    dropped = [day for day in existing if day < oldest][:most]
    await _drop(session, dropped)
    return Changed(made, dropped, sum(strays[day] for day in missing if day not in made))


async def _days_in_default(session: AsyncSession) -> dict[date, int]:
    """Days of the rows in the default partition, with their number."""
    rows = await session.execute(
        text(f"SELECT (finished_at AT TIME ZONE 'UTC')::date, count(*) FROM {DEFAULT} GROUP BY 1")  # noqa: S608
    )
    return {row[0]: int(row[1]) for row in rows}


async def _make(session: AsyncSession, new: Sequence[date], moving: Sequence[date]) -> None:
    """Attach a table for each day of `new`: that takes no lock which readers and writers of other days wait for.

    For the days of `moving` the default partition is detached, which takes the append-only trigger off it, and their
    rows are moved before anybody can see the ledger without them.
    """
    if moving:
        await session.execute(text(f"ALTER TABLE usage_ledger DETACH PARTITION {DEFAULT}"))
    for day in new:
        name = f"{PREFIX}{day:%Y%m%d}"
        like = "LIKE usage_ledger INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES"
        await session.execute(text(f"CREATE TABLE {name} ({like})"))
        if day in moving:
            await session.execute(
                text(
                    f"WITH moved AS (DELETE FROM {DEFAULT} "  # noqa: S608
                    "WHERE finished_at >= :since AND finished_at < :until RETURNING *) "
                    f"INSERT INTO {name} SELECT * FROM moved"
                ),
                {"since": start_of(day), "until": start_of(day + _DAY)},
            )
        bounds = f"FROM ('{start_of(day).isoformat()}') TO ('{start_of(day + _DAY).isoformat()}')"
        await session.execute(text(f"ALTER TABLE usage_ledger ATTACH PARTITION {name} FOR VALUES {bounds}"))
    if moving:
        await session.execute(text(f"ALTER TABLE usage_ledger ATTACH PARTITION {DEFAULT} DEFAULT"))


async def _drop(session: AsyncSession, gone: Sequence[date]) -> None:
    for day in gone:
        await session.execute(text(f"DROP TABLE {PREFIX}{day:%Y%m%d}"))
    if gone:
        await session.execute(text("DELETE FROM usage_daily WHERE day = ANY(:days)"), {"days": list(gone)})


def _day_of(name: str) -> date:
    digits = name.removeprefix(PREFIX)
    return date(int(digits[:4]), int(digits[4:6]), int(digits[6:]))
