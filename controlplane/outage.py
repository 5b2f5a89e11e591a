"""Telling what a store's error means: it is away, it cannot now, or it was given what it cannot hold.

Layer: service. Postgres and Redis drivers raise many types when a server is gone; this is the one place that
knows them. It never decides what to do about it.
"""

from __future__ import annotations

import asyncpg
import redis.exceptions
import sqlalchemy.exc

_DATABASE_AWAY = (
    asyncpg.exceptions.CannotConnectNowError,
    asyncpg.exceptions.ConnectionDoesNotExistError,
    asyncpg.exceptions.AdminShutdownError,
    asyncpg.exceptions.CrashShutdownError,
    asyncpg.exceptions.TooManyConnectionsError,
    asyncpg.InterfaceError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.TimeoutError,
    ConnectionError,
    TimeoutError,
)
_AWAY_STATES = ("08", "57P01", "57P02", "57P03", "53300")
"""SQLSTATEs (or their class) of a server that is shutting down, starting up, full, or out of reach."""
_REDIS_AWAY = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)


def away(error: BaseException) -> str | None:
    """ "database" or "redis" when `error` says that store cannot be reached, else None."""
    if isinstance(error, _REDIS_AWAY):
        return "redis"
    if isinstance(error, _DATABASE_AWAY):
        return "database"
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        state = getattr(error.orig, "sqlstate", None) or ""
        if error.connection_invalidated or state.startswith(_AWAY_STATES):
            return "database"
    return None


_NOT_NOW_STATES = ("25006", "40", "53", "55", "57", "58")
"""SQLSTATEs (or their class) of what a server undid for others' sake, had no room, memory or lock for, was told to
stop, could not read or write, or may not write while it follows another."""


def not_now(error: BaseException) -> bool:
    """Whether the database is there and the same statement may succeed later: nothing is wrong with its values."""
    if not isinstance(error, sqlalchemy.exc.DBAPIError):
        return False
    return (getattr(error.orig, "sqlstate", None) or "").startswith(_NOT_NOW_STATES)


def unstorable(error: BaseException) -> bool:
    """Whether a value was refused that no column can hold: text with a NUL character or that is too long, or an instant
    or a number beyond what Postgres or its driver can express.
    """
    if not isinstance(error, sqlalchemy.exc.DBAPIError):
        return False
    if getattr(error.orig, "sqlstate", None) in {"22001", "22021", "22P05"}:
        return True
    cause: BaseException | None = error.orig
    while cause is not None and not isinstance(cause, OverflowError):
        cause = cause.__cause__
    return cause is not None
