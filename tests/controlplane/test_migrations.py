"""Migrations: they match the models, go down again, and every policy change is counted and announced."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, pool, text
from sqlalchemy.exc import OperationalError

from controlplane.db import POLICY_CHANNEL, Base, driver_url
from controlplane.migrate import alembic_config, current, head, load_models, managed, upgrade
from controlplane.settings import Secret
from tests.services import Databases

CHECKOUT = Path(__file__).parents[2]


def test_the_models_of_all_domains_match_the_migrated_database(database_url: str) -> None:
    load_models()
    engine = create_engine(driver_url(database_url, "psycopg"), poolclass=pool.NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "compare_type": True,
                "compare_server_default": True,
                "target_metadata": Base.metadata,
                "include_name": managed,
            },
        )
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_every_revision_goes_down_and_up_again(postgres: Databases) -> None:
    url = Secret(postgres.create("updown"))
    assert current(url) is None
    upgrade(url)
    assert current(url) == head()
    command.downgrade(alembic_config(url), "base")
    engine = create_engine(driver_url(url.reveal(), "psycopg"), poolclass=pool.NullPool)
    with engine.connect() as connection:
        left = connection.execute(
            text(
                "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
                "WHERE nspname = 'public' AND relkind IN ('r', 'p', 'S') AND relname <> 'alembic_version'"
            )
        )
        assert left.scalars().all() == []
    engine.dispose()
    upgrade(url)
    assert current(url) == head()


def test_two_upgrades_at_once_take_turns(postgres: Databases) -> None:
    url = postgres.create("race")
    code = (
        "import sys; from controlplane.migrate import upgrade; from controlplane.settings import Secret;"
        "upgrade(Secret(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    both = [subprocess.Popen([sys.executable, "-c", code, url], env=environment, cwd="/") for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert current(Secret(url)) == head()


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("UPDATE tenants SET active = false WHERE slug = 'acme'", "tenants"),
        ("UPDATE api_keys SET revoked_at = now()", "api_keys"),
        ("DELETE FROM api_keys", "api_keys"),
        ("DELETE FROM tenants", "tenants"),
        ("TRUNCATE tenants CASCADE", "tenants"),
        ("UPDATE quotas SET hard = 5", "quotas"),
        ("UPDATE quota_grants SET expires_at = now()", "quota_grants"),
        ("DELETE FROM quotas", "quota_grants"),
        ("UPDATE prices SET valid_until = now() + interval '1 day'", "prices"),
        ("UPDATE slos SET enabled = false", "slos"),
        ("TRUNCATE prices", "prices"),
    ],
)
async def test_a_policy_change_by_anybody_bumps_the_epoch_and_notifies(
    committed_database: str, statement: str, table: str
) -> None:
    heard: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    listener, writer = await asyncpg.connect(committed_database), await asyncpg.connect(committed_database)
    await writer.execute("INSERT INTO tenants (slug, name, cache_salt) VALUES ('acme', 'Acme', 'salt')")
    await writer.execute(
        "WITH project AS (INSERT INTO projects (tenant_id, slug, name) SELECT id, 'default', 'Default' FROM tenants "
        "RETURNING id, tenant_id) INSERT INTO api_keys (key_id, identity, tenant_id, project_id, name, secret_hash, "
        "last4) SELECT 'k1', 'k1', tenant_id, id, 'ci', '\\x00', 'abcd' FROM project"
    )
    await writer.execute(
        "WITH quota AS (INSERT INTO quotas (tenant_id, tenant, kind, hard) SELECT id, slug, 'tokens_per_day', 1 FROM "
        "tenants RETURNING id, tenant_id) INSERT INTO quota_grants (quota_id, tenant_id, amount, starts_at, "
        "expires_at, reason, granted_by) SELECT id, tenant_id, 1, now(), now() + interval '1 day', 'x', 'op' FROM quota"
    )
    await writer.execute(
        "INSERT INTO prices (pool, uncached_input, cached_input, output, device_second, valid_from, set_by) "
        "VALUES ('gpu', 1, 1, 1, 1, now(), 'op')"
    )
    await writer.execute("INSERT INTO slos (availability) VALUES (0.9)")
    before = await writer.fetchval("SELECT epoch FROM policy_state")
    tenant = str(await writer.fetchval("SELECT id FROM tenants"))
    ids = {"tenants": tenant, "api_keys": "k1", "quotas": tenant, "quota_grants": tenant, "prices": "gpu", "slos": ""}
    await listener.add_listener(POLICY_CHANNEL, lambda *event: heard.put_nowait(json.loads(event[3])))
    await writer.execute(statement)
    events = [await asyncio.wait_for(heard.get(), 10)]
    while not heard.empty():
        events.append(heard.get_nowait())
    assert await writer.fetchval("SELECT epoch FROM policy_state") > before
    mine = next(event for event in events if event["table"] == table)
    assert mine["id"] == ("" if statement.startswith("TRUNCATE") else ids[table])
    assert mine["epoch"] > before
    await listener.close()
    await writer.close()


async def test_a_rolled_back_change_is_neither_counted_nor_announced(committed_database: str) -> None:
    heard: list[object] = []
    listener, writer = await asyncpg.connect(committed_database), await asyncpg.connect(committed_database)
    await listener.add_listener(POLICY_CHANNEL, lambda *event: heard.append(event))
    before = await writer.fetchval("SELECT epoch FROM policy_state")
    undone = writer.transaction()
    await undone.start()
    await writer.execute("INSERT INTO tenants (slug, name, cache_salt) VALUES ('gone', 'Gone', 'salt')")
    await undone.rollback()
    await listener.execute("SELECT 1")
    assert await writer.fetchval("SELECT epoch FROM policy_state") == before
    assert heard == []
    await listener.close()
    await writer.close()


def test_a_migration_gives_up_on_a_lock_instead_of_queueing_traffic_behind_itself(postgres: Databases) -> None:
    url = Secret(postgres.create("locked"))
    upgrade(url)
    with psycopg.connect(url.reveal()) as holder:
        holder.execute("LOCK TABLE tenants IN ACCESS SHARE MODE")
        with pytest.raises(OperationalError, match="lock timeout"):
            command.downgrade(alembic_config(url), "base")
    assert current(url) is not None
