"""Which errors mean that a store is away, as the drivers raise them through SQLAlchemy."""

from __future__ import annotations

import asyncpg
import pytest
import sqlalchemy.exc

from controlplane.outage import away, not_now


def wrapped(cause: asyncpg.PostgresError) -> sqlalchemy.exc.DBAPIError:
    return sqlalchemy.exc.DBAPIError("SELECT 1", None, cause)


@pytest.mark.parametrize(
    "cause",
    [
        asyncpg.CannotConnectNowError("the database system is starting up"),
        asyncpg.AdminShutdownError("terminating connection"),
        asyncpg.CrashShutdownError("terminating connection because of crash"),
        asyncpg.TooManyConnectionsError("sorry, too many clients already"),
        asyncpg.ConnectionFailureError("lost"),
    ],
)
def test_f15_a_server_that_starts_stops_or_is_full_is_away(cause: asyncpg.PostgresError) -> None:
    assert away(cause if isinstance(cause, asyncpg.CannotConnectNowError) else wrapped(cause)) == "database"
    assert away(wrapped(cause)) == "database"


@pytest.mark.parametrize(
    "cause",
    [
        asyncpg.DeadlockDetectedError("deadlock detected"),
        asyncpg.SerializationError("could not serialize access"),
        asyncpg.DiskFullError("could not extend file"),
        asyncpg.LockNotAvailableError("canceling statement due to lock timeout"),
        asyncpg.QueryCanceledError("canceling statement due to user request"),
        asyncpg.ReadOnlySQLTransactionError("cannot execute INSERT in a read-only transaction"),
    ],
)
def test_f15_a_server_that_cannot_now_is_neither_away_nor_are_values_wrong(cause: asyncpg.PostgresError) -> None:
    assert not_now(wrapped(cause))
    assert away(wrapped(cause)) is None


def test_a_mistake_in_a_statement_is_no_outage() -> None:
    assert away(wrapped(asyncpg.UniqueViolationError("twice"))) is None
    assert away(ValueError("mine")) is None
    assert not not_now(wrapped(asyncpg.UniqueViolationError("twice")))
    assert not not_now(wrapped(asyncpg.NumericValueOutOfRangeError("too large")))
    assert not not_now(ValueError("mine"))
