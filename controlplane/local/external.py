"""Looks at a PostgreSQL or Redis that somebody else runs, before anything is started against it.

Layer: service. Only host, port and database name are ever printed: never a password, never a driver's own message
that might quote one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import psycopg
import redis
from sqlalchemy.engine import make_url

from controlplane.local.errors import ExitCode, LocalError
from controlplane.settings import Secret, SettingsError, require_database_url, require_redis_url

CONNECT_S = 5
OLDEST_POSTGRES = 15
OLDEST_REDIS = (7, 0)


def database_version(url: Secret) -> str:
    """The server's version. Raises LocalError with one sentence about DATABASE_URL."""
    _require(require_database_url, url)
    parts = make_url(url.reveal())
    where = f"{parts.host or 'localhost'}:{parts.port or 5432}/{parts.database}"
    plain = parts.set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        with psycopg.connect(plain, connect_timeout=CONNECT_S) as connection:
            version = connection.info.server_version
            allowed = connection.execute("SELECT has_schema_privilege(current_schema(), 'CREATE')").fetchone()
    except psycopg.OperationalError as error:
        raise _unreachable("DATABASE_URL", where, _database_reason(str(error))) from None
    except psycopg.Error as error:
        raise _unreachable("DATABASE_URL", where, type(error).__name__) from None
    major, minor = divmod(version, 10000)
    if major < OLDEST_POSTGRES:
        raise _unreachable(
            "DATABASE_URL", where, f"it is PostgreSQL {major}, and {OLDEST_POSTGRES} is the oldest supported"
        )
    if not allowed or not allowed[0]:
        raise _unreachable("DATABASE_URL", where, f"{parts.username} may not create tables in it")
    return f"{major}.{minor}"


def _database_reason(said: str) -> str:
    """libpq's message without anything a user wrote."""
    for pattern, reason in (
        (r"Connection refused", "nothing listens there"),
        (
            r"could not translate host name|Name or service not known|failed to resolve",
            "its host name does not resolve",
        ),
        (r"password authentication failed", "the password or user is wrong"),
        (r"timeout expired|timed out", f"no answer within {CONNECT_S} s"),
        (r'database "[^"]*" does not exist', "the database does not exist"),
        (r'role "[^"]*" does not exist', "the user does not exist"),
        (r"no pg_hba.conf entry", "the server does not let this user in from here"),
        (r"too many clients|remaining connection slots", "the server has no connection left"),
        (r"SSL|certificate", "TLS could not be agreed on"),
        (r"starting up|shutting down", "the server is starting or stopping"),
    ):
        if re.search(pattern, said, re.IGNORECASE):
            return reason
    return "the connection failed"


def redis_version(url: Secret) -> str:
    """The server's version. Raises LocalError with one sentence about REDIS_URL."""
    _require(require_redis_url, url)
    client = redis.Redis.from_url(url.reveal(), socket_connect_timeout=CONNECT_S, socket_timeout=CONNECT_S)
    place = client.connection_pool.connection_kwargs
    where = f"{place.get('host', place.get('path', 'localhost'))}:{place.get('port', 6379)}/{place.get('db', 0)}"
    with client:
        try:
            about = client.info("server")
        except redis.AuthenticationError:
            raise _unreachable("REDIS_URL", where, "the password or user is wrong") from None
        except redis.TimeoutError:
            raise _unreachable("REDIS_URL", where, f"no answer within {CONNECT_S} s") from None
        except redis.ConnectionError as error:
            refused = "refused" in str(error)
            reason = "nothing listens there" if refused else "the connection failed"
            raise _unreachable("REDIS_URL", where, reason) from None
        except redis.RedisError as error:
            raise _unreachable("REDIS_URL", where, type(error).__name__) from None
    version = str(about.get("valkey_version") or about["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise _unreachable("REDIS_URL", where, f"it is version {version}, and 7.0 is the oldest supported")
    return version


def _require(check: Callable[[Secret], None], url: Secret) -> None:
    try:
        check(url)
    except SettingsError as error:
        raise LocalError(str(error), ExitCode.USAGE) from None


def _unreachable(variable: str, where: str, reason: str) -> LocalError:
    return LocalError(
        f"{variable} ({where}) cannot be used: {reason}; correct it, or unset it to use the embedded server",
        ExitCode.SERVICE_UNREACHABLE,
    )
