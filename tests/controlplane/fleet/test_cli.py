"""`tidegate pool|replica` against a real control-plane process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.cli import main
from controlplane.fleet import service
from controlplane.fleet.live import LiveGauges, gauges_key
from controlplane.redis_client import create_redis
from controlplane.settings import Settings
from dataplane.protocol import Gauges, encode
from tests.controlplane.pointed import pointed
from tests.controlplane.telemetry.reports import BOOT, report


@pytest.fixture
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control plane with a pool and a replica, and an environment that points at it as operator."""

    async def seed(session: AsyncSession) -> None:
        await service.ensure_pool(session, "small", "m")
        await service.take_in(session, [report("one", pool="small", model="m")], 0.0)
        redis = create_redis(settings.redis_url)
        idle = LiveGauges(at=0.0, boot_epoch=BOOT, gauges=Gauges(waiting=3, blocks_total=100))
        await redis.set(gauges_key("one"), encode(idle), ex=60)
        await redis.aclose()

    with pointed(settings, monkeypatch, seed):
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
    heading, line = run("replica", "list").stdout.splitlines()
    assert "running  waiting" in heading
    assert line[heading.index("running") :].split()[:2] == ["0", "3"]  # a gauge of 0 is not in the answer

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
