"""`tidegate prompts` against a real control-plane process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.cli import main
from controlplane.db import create_engine, transaction
from controlplane.promptlog import service
from controlplane.settings import Settings
from tests.controlplane.pointed import pointed
from tests.controlplane.promptlog.test_service import entry
from tests.factories.rows import make_tenant


@pytest.fixture
def acme(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A control plane with the tenant acme, and an environment that points at it as operator."""

    async def seed(session: AsyncSession) -> None:
        await make_tenant(session, "acme")

    with pointed(settings, monkeypatch, seed):
        yield settings


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["prompts", *arguments])


def data(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_an_operator_keeps_lists_reads_and_forgets(acme: Settings) -> None:
    assert data("show", "acme")["log_prompts"] is False
    on = data("on", "acme", "--days", "3", "--sample", "0.5", "--redact", "emails", "--template", "EMP-####")
    assert (on["log_prompts"], on["retention_days"], on["sample"]) == (True, 3, 0.5)
    assert (on["redact"], on["templates"]) == (["emails"], ["EMP-####"])

    async def log() -> None:
        engine = create_engine(acme, pooled=False)
        async with transaction(engine) as session:
            from controlplane.tenants.service import get_tenant

            await service.store(session, [entry((await get_tenant(session, "acme")).id)])
        await engine.dispose()

    asyncio.run(log())
    (listed,) = data("list", "acme")
    assert "prompt" not in listed
    read = run("read", "acme", str(listed["id"]))
    assert read.stdout == "prompt 0\n---\nanswer 0\n"
    (who,) = data("reads", "acme")
    assert who["entry_id"] == listed["id"]
    assert data("off", "acme")["log_prompts"] is False
    assert "no logged requests" in run("list", "acme").stderr


def test_what_is_wrong_is_one_sentence(acme: Settings) -> None:
    for arguments, code in ((["on", "acme", "--days", "31"], 2), (["show", "nobody"], 1), (["read", "acme", "1"], 1)):
        done = run(*arguments)
        assert done.exit_code == code
        assert "Traceback" not in done.output
    assert run("on", "acme", "--template", "##").exit_code == 2
