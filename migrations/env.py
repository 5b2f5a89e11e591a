"""Alembic environment: runs the revisions of `versions/` against one Postgres.

Layer: service. The caller (`controlplane.migrate`) hands over the URL in `config.attributes`; this file never
reads a configuration file. Every statement has a lock timeout, so a migration gives up instead of queueing all
traffic behind itself, and an advisory lock makes concurrent upgrades take turns.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, pool, text

from controlplane.db import Base
from controlplane.migrate import managed

UPGRADE_LOCK = 0x7469_6465
"""Key of the advisory lock that serialises upgrades ("tide")."""


def run() -> None:
    url: str = context.config.attributes["url"]
    engine = create_engine(url, poolclass=pool.NullPool, connect_args={"connect_timeout": 10})
    try:
        with engine.connect() as connection:
            connection.execute(text("SET lock_timeout = '60s'"))
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": UPGRADE_LOCK})
            connection.execute(text("SET lock_timeout = '5s'"))
            connection.execute(text("SET statement_timeout = '60s'"))
            connection.execute(text("SET application_name = 'tidegate-migrate'"))
            connection.commit()
            context.configure(
                connection=connection,
                target_metadata=Base.metadata,
                compare_type=True,
                compare_server_default=True,
                include_name=managed,
                transaction_per_migration=True,
            )
            with context.begin_transaction():
                context.run_migrations()
    finally:
        engine.dispose()


run()
