"""What a first start makes, and that the next one changes nothing."""

from __future__ import annotations

import stat

import pytest

from controlplane.db import create_engine, transaction
from controlplane.fleet import service as fleet
from controlplane.local.bootstrap import bootstrap
from controlplane.local.home import Home
from controlplane.settings import Settings
from controlplane.tenants import keys
from controlplane.tenants import service as tenants


@pytest.fixture
def home(settings: Settings) -> Home:
    home = Home(settings.home)
    settings.home.mkdir(parents=True)
    return home


async def test_a_repeat_changes_nothing(home: Home, settings: Settings) -> None:
    first = await bootstrap(home, settings, "smollm2", "served")
    second = await bootstrap(home, settings, "smollm2", "served")
    assert first == second
    engine = create_engine(settings, pooled=False)
    async with transaction(engine) as session:
        assert len((await tenants.list_keys(session, "demo")).items) == 1
        assert [(pool.name, pool.model) for pool in await fleet.list_pools(session)] == [("smollm2", "served")]
    await engine.dispose()
    for file in (home.admin_file, home.demo_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_revoked_or_lost_demo_key_is_replaced_by_one_that_works(home: Home, settings: Settings) -> None:
    _, before = await bootstrap(home, settings, "smollm2", "served")
    engine = create_engine(settings, pooled=False)
    async with transaction(engine) as session:
        await tenants.revoke_key(session, keys.parse(before.key).key_id)
    _, after = await bootstrap(home, settings, "smollm2", "served")
    assert after.key != before.key
    home.demo_file.unlink()
    _, again = await bootstrap(home, settings, "smollm2", "served")
    assert again.key not in {before.key, after.key}
    async with transaction(engine) as session:
        grant = await tenants.load_key(session, keys.parse(again.key).key_id)
    assert grant is not None
    assert keys.verify(keys.parse(again.key), grant)
    assert not grant.revoked
    await engine.dispose()


async def test_a_demo_key_that_was_rotated_away_is_replaced(home: Home, settings: Settings) -> None:
    _, before = await bootstrap(home, settings, "smollm2", "served")
    engine = create_engine(settings, pooled=False)
    async with transaction(engine) as session:
        await tenants.rotate_key(session, keys.parse(before.key).key_id, grace_s=0)
    _, after = await bootstrap(home, settings, "smollm2", "served")
    assert after.key != before.key
    await engine.dispose()


async def test_a_demo_tenant_that_an_operator_shut_out_gets_no_key_at_each_start(
    home: Home, settings: Settings
) -> None:
    _, before = await bootstrap(home, settings, "smollm2", "served")
    engine = create_engine(settings, pooled=False)
    async with transaction(engine) as session:
        await tenants.set_tenant_active(session, "demo", False)
    for _ in range(2):
        _, after = await bootstrap(home, settings, "smollm2", "served")
        assert after == before
    async with transaction(engine) as session:
        assert len((await tenants.list_keys(session, "demo")).items) == 1
    await engine.dispose()
