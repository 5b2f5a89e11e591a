"""Real PostgreSQL and Valkey for a test run: embedded ones, or those of DATABASE_URL and REDIS_URL.

A run makes its own databases and drops them again; a given Redis must be empty, because tests flush it.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import redis
from sqlalchemy.engine import make_url

from controlplane.local.postgres import EmbeddedPostgres
from controlplane.local.valkey import EmbeddedValkey

SEEDED = frozenset({"alembic_version", "policy_state"})
"""Tables that a migrated database holds rows in; `Databases.empty` knows how to restore these and no others."""


def free_port() -> int:
    """A loopback port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def loopback_socket() -> socket.socket:
    """A socket bound to a free loopback port, for a server to listen on.

    Its protocol is named: asyncio lets small writes go out at once only where it reads that they are TCP.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", 0))
    return listening


class Databases:
    """Makes databases on one server and drops what it made. `admin_url` may create databases."""

    def __init__(self, admin_url: str) -> None:
        self.admin_url = admin_url
        self._run = secrets.token_hex(4)
        self._made: list[str] = []

    def create(self, label: str, *, template: str | None = None) -> str:
        """A new database's URL; `template` is the URL of the database to copy."""
        name = f"tidegate_test_{self._run}_{label}_{len(self._made)}"
        source = f' TEMPLATE "{make_url(template).database}"' if template else ""
        self._execute(f'CREATE DATABASE "{name}"{source}')
        self._made.append(name)
        return make_url(self.admin_url).set(database=name).render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        """Drop a database made here, ending whoever is still connected."""
        name = make_url(url).database
        if name in self._made:
            self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            self._made.remove(name)

    def empty(self, url: str) -> None:
        """Make a migrated database as fresh as a new one, for far less, ending whoever is still connected."""
        with psycopg.connect(url) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            tables = [name for name in _tables(connection) if name not in SEEDED]
            connection.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE")
            connection.execute("UPDATE policy_state SET epoch = 0")
            connection.execute("DELETE FROM policy_epochs")  # emptying counted as changes

    def drop_all(self) -> None:
        for name in list(self._made):
            self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        self._made.clear()

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(statement)  # names are generated above


def _tables(connection: psycopg.Connection[Any]) -> list[str]:
    found = connection.execute(
        "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
        "WHERE nspname = 'public' AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY relname"
    )
    return [str(row[0]) for row in found]


def tables_with_rows(url: str) -> set[str]:
    """Names of the tables that hold anything."""
    with psycopg.connect(url) as connection:
        return {
            name for name in _tables(connection) if connection.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone()
        }


def forget_durability(admin_url: str) -> None:
    """Let an embedded server of a test run skip what only a crash would need; it is thrown away at the end."""
    with psycopg.connect(admin_url, autocommit=True) as connection:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("SELECT pg_reload_conf()")


@contextmanager
def service_folder(label: str) -> Iterator[Path]:
    """A temporary folder that a server running as another user may pass through."""
    folder = Path(tempfile.mkdtemp(prefix=f"tidegate-{label}-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_server(given: str | None) -> Iterator[Databases]:
    """The server of `given`, or an embedded one on a free port."""
    if given:
        databases = Databases(given)
        try:
            yield databases
        finally:
            databases.drop_all()
        return
    with service_folder("pg") as folder:
        server = EmbeddedPostgres(folder / "data", free_port())
        server.start()
        try:
            forget_durability(server.url)
            yield Databases(server.url)
        finally:
            server.stop()


@contextmanager
def valkey_server(given: str | None) -> Iterator[str]:
    """The URL of `given`, or of an embedded server on a free port."""
    if given:
        with redis.Redis.from_url(given) as client:
            if client.dbsize():
                raise RuntimeError("REDIS_URL names a database that holds keys; tests flush theirs: give an empty one")
        yield given
        return
    with service_folder("valkey") as folder:
        server = EmbeddedValkey(folder / "data", free_port())
        server.start()
        try:
            yield server.url
        finally:
            server.stop()
