"""Postgres: metadata, engines and the one transaction a request or task runs in.

Layer: service. Application code never commits; `transaction` does, once, at its end, and then runs what was
registered with `after_commit` (publishing Celery work, notifying).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import MetaData, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.pool import NullPool

from controlplane.settings import Settings

POLICY_CHANNEL = "tidegate_policy"
"""NOTIFY channel: {"table", "id", "epoch"} on every committed change of tenants, keys, pools and replicas."""

NAMING = {
    "ix": "ix_%(column_0_N_label)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Every model's base; relationships are `lazy="raise"`."""

    metadata = MetaData(naming_convention=NAMING)


def driver_url(url: str, driver: str) -> str:
    """`url` with SQLAlchemy's driver name (`asyncpg` or `psycopg`). Raises ArgumentError when it is no URL."""
    return make_url(url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)


def create_engine(settings: Settings, *, pool_size: int = 10, pooled: bool = True) -> AsyncEngine:
    """An asyncpg engine; `pooled=False` for short-lived loops such as one Celery task."""
    pool: dict[str, Any] = (
        {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": 5.0, "pool_pre_ping": True}
        if pooled
        else {"poolclass": NullPool}
    )
    return create_async_engine(
        driver_url(settings.database_url.reveal(), "asyncpg"),
        connect_args={"timeout": 5.0, "command_timeout": 15.0, "server_settings": {"application_name": "tidegate"}},
        **pool,
    )


def after_commit(session: AsyncSession, action: Callable[[], Awaitable[None]]) -> None:
    """Run `action` once the session's transaction is committed; a rollback drops it."""
    session.info.setdefault("after_commit", []).append(action)


async def acting_as(session: AsyncSession, who: str) -> None:
    """Whatever the session's transaction changes in the policy is `who`'s, for the history (migration 0007)."""
    await session.execute(text("SELECT set_config('tidegate.actor', :who, true)"), {"who": who})


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """One session in one transaction: committed at the end, rolled back on any exception."""
    async with AsyncSession(engine, expire_on_commit=False) as session:
        async with session.begin():
            yield session
        for action in session.info.pop("after_commit", []):
            await action()
