"""`tidegate pool|replica` against a real control-plane process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controlplane.accounts import service as accounts
from controlplane.accounts.schemas import Role
from controlplane.cli import main
from controlplane.db import create_engine, transaction
from controlplane.fleet import service
from controlplane.settings import Settings
from tests.controlplane.telemetry.reports import report
from tests.controlplane.test_serve import serving

TOKEN = "operator-token-of-this-test"


@pytest.fixture
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control plane with a pool and a replica, and an environment that points at it as operator."""

    async def seed() -> None:
        engine = create_engine(settings, pooled=False)
        async with transaction(engine) as session:
            await accounts.ensure_api_token(session, "operator", TOKEN, Role.OPERATOR)
            await service.ensure_pool(session, "small", "m")
            await service.take_in(session, [report("one", pool="small", model="m")], 0.0)
        await engine.dispose()

    asyncio.run(seed())
    with serving("control", settings) as (_, port):
        monkeypatch.setenv("TIDEGATE_CONTROL_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", TOKEN)
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def data(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_pools_are_sized_and_replicas_drained(served: None) -> None:
    assert "as told" in run("pool", "list").stdout
    changed = data("pool", "change", "small", "--slots", "16", "--tokens", "65536")
    assert (changed["replica_slots"], changed["replica_tokens"]) == (16, 65536)
    assert data("pool", "change", "small", "--slots", "0")["replica_tokens"] == 65536
    assert "65536" in run("pool", "list").stdout

    assert data("replica", "drain", "one")["drain_wanted"] is True
    assert "operator asked to drain it" in run("replica", "list", "--pool", "small").stdout
    told = run("replica", "undrain", "one")
    assert told.stdout.startswith("one is to serve; it is ")
    assert [row["replica"] for row in data("replica", "list")] == ["one"]
    assert data("replica", "list", "--pool", "other") == []

    for arguments, code, sentence in (
        (("pool", "change", "small"), 2, "nothing to change"),
        (("pool", "change", "nothing", "--slots", "1"), 1, "nothing"),
        (("pool", "change", "small", "--slots", "1000001"), 2, "1000000"),
        (("replica", "drain", "two"), 1, "two"),
    ):
        done = run(*arguments)
        assert done.exit_code == code, done.output
        assert sentence in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
