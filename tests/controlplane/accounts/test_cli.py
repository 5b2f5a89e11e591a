"""`tidegate user|token` against a real control-plane process."""

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
from controlplane.settings import Settings
from tests.controlplane.test_serve import serving
from tests.factories.rows import make_user

TOKEN = "operator-token-of-this-test"
PASSWORD = "correct horse battery staple"


@pytest.fixture
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control plane, and an environment that points at it as operator."""

    async def seed() -> None:
        engine = create_engine(settings, pooled=False)
        async with transaction(engine) as session:
            await accounts.ensure_api_token(session, "operator", TOKEN, Role.OPERATOR)
            await make_user(session, email="root@example.com")
        await engine.dispose()

    asyncio.run(seed())
    with serving("control", settings) as (_, port):
        monkeypatch.setenv("TIDEGATE_CONTROL_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", TOKEN)
        yield


def run(*arguments: str, typed: str = "", token: str = TOKEN) -> Result:
    return CliRunner().invoke(main, list(arguments), input=typed, env={"TIDEGATE_ADMIN_TOKEN": token})


def data(*arguments: str, typed: str = "") -> Any:
    done = run(*arguments, "--json", typed=typed)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_users_and_tokens_are_made_changed_and_ended(served: None) -> None:
    ada = data("user", "create", "ada@example.com", typed=f"{PASSWORD}\n")
    assert (ada["email"], ada["role"], ada["active"]) == ("ada@example.com", "viewer", True)
    assert data("user", "change", "Ada@Example.com", "--role", "operator")["role"] == "operator"
    assert data("user", "change", "ada@example.com", "--password", typed=f"{PASSWORD} 2\n")["id"] == ada["id"]
    assert data("user", "deactivate", "ada@example.com")["active"] is False
    assert "inactive" in run("user", "list").stdout
    assert data("user", "activate", "ada@example.com")["active"] is True

    made = run("token", "create", "ci", "--role", "operator", "--expires", "2999-01-01")
    text = made.stdout.strip()
    assert "not shown again" in made.stderr
    listed = run("token", "list", token=text)
    assert listed.exit_code == 0, listed.output
    assert "2999-01-01 00:00Z" in listed.stdout
    assert text not in listed.stdout
    (ci,) = (row for row in data("token", "list") if row["name"] == "ci")
    assert data("token", "revoke", ci["id"])["revoked_at"] is not None
    assert run("token", "list", token=text).exit_code == 1

    for arguments, typed, code, sentence in (
        (("user", "create", "bob@example.com"), "", 2, "no password on standard input"),
        (("user", "create", "bob@example.com"), "short\n", 2, "12 to 1024 characters"),
        (("user", "change", "nobody@example.com", "--role", "viewer"), "", 1, "there is no user nobody@example.com"),
        (("user", "change", "ada@example.com"), "", 2, "nothing to change"),
    ):
        done = run(*arguments, typed=typed)
        assert done.exit_code == code, done.output
        assert sentence in done.stderr
        assert PASSWORD not in done.output
