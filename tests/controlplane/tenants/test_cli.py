"""`tidegate tenant|key` against a real control-plane process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from controlplane.accounts import service as accounts
from controlplane.accounts.schemas import Role
from controlplane.cli import main
from controlplane.db import create_engine, transaction
from controlplane.fleet import service as fleet
from controlplane.settings import Settings
from controlplane.tenants import keys
from tests.controlplane.telemetry.reports import report
from tests.controlplane.test_serve import serving

TOKENS = {Role.OPERATOR: "operator-token-of-this-test", Role.VIEWER: "viewer-token-of-this-test"}


@pytest.fixture
def url(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A control plane, and an environment that points at it as operator."""

    async def seed() -> None:
        engine = create_engine(settings, pooled=False)
        async with transaction(engine) as session:
            for role, token in TOKENS.items():
                await accounts.ensure_api_token(session, role.value, token, role)
        await engine.dispose()

    asyncio.run(seed())
    with serving("control", settings) as (_, port):
        monkeypatch.setenv("TIDEGATE_CONTROL_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", TOKENS[Role.OPERATOR])
        yield f"http://127.0.0.1:{port}"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def good(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_newcomer_creates_uses_up_and_takes_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no tenants yet" in run("tenant", "list").stderr
    assert "acme" in good("tenant", "create", "acme", "--name", "Acme [red]Corp", "--model", "m1")
    shown = good("tenant", "show", "acme")
    assert "Acme [red]Corp" in shown
    assert "m1" in shown
    made = run("key", "create", "acme", "--name", "ci", "--expires", "2999-01-01")
    plain = made.stdout.strip()
    parsed = keys.parse(plain)
    assert "shown this once" in made.stderr
    listed = good("key", "list", "acme")
    assert parsed.key_id in listed
    assert "expires" in listed.splitlines()[0].split()
    assert "2999-01-01 00:00Z" in listed
    good("key", "create", "acme", "--name", "endless")
    rows = good("key", "list", "acme").splitlines()
    assert next(row for row in rows if "endless" in row).split()[-1] == "never"
    assert plain not in listed
    assert "revoked" in good("key", "revoke", plain)
    assert json.loads(good("key", "list", "acme", "--json"))[0]["revoked_at"]
    assert "inactive" in good("tenant", "deactivate", "acme")
    assert json.loads(good("tenant", "activate", "acme", "--json"))["active"] is True
    again = [good("tenant", "create", "twice", "--idempotency-key", "k", "--json") for _ in range(2)]
    assert again[0] == again[1]
    assert json.loads(good("key", "create", "acme", "--json"))["view"]["tenant"] == "acme"

    taken = run("tenant", "create", "acme")
    assert (taken.exit_code, taken.stderr) == (1, "tidegate: a tenant with the slug acme exists already\n")
    wrong = run("tenant", "create", "NOT OK")
    assert wrong.exit_code == 2
    assert wrong.stderr == "tidegate: slug: 'NOT OK' must be 1 to 40 lower-case letters, digits and hyphens\n"
    nobody = run("tenant", "show", "../keys")
    assert nobody.exit_code == 1
    assert "there is no tenant" in nobody.stderr
    damaged = run("key", "revoke", plain[:-1] + ("a" if plain[-1] != "a" else "b"))
    assert damaged.exit_code == 2
    assert "checksum" in damaged.stderr

    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", TOKENS[Role.VIEWER])
    assert "acme" in good("tenant", "list")
    refused = run("tenant", "deactivate", "acme")
    assert (refused.exit_code, refused.stderr) == (1, "tidegate: viewer may look but not change anything\n")
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", "not-a-token-at-all")
    stranger = run("tenant", "list")
    assert stranger.exit_code == 1
    assert "valid admin token" in stranger.stderr
    assert "not-a-token" not in stranger.output


def test_a_model_that_nobody_serves_now_is_taken_and_said(url: str, settings: Settings) -> None:
    async def serve() -> None:
        engine = create_engine(settings, pooled=False)
        async with transaction(engine) as session:
            await fleet.ensure_pool(session, "pool", "served")
            await fleet.take_in(session, [report("r1", pool="pool", model="served")], 0.0)
        await engine.dispose()

    missing = "served by no replica now: missing\n"
    made = run("tenant", "create", "acme", "--model", "served", "--model", "missing")
    assert (made.exit_code, made.stderr) == (0, "served by no replica now: missing, served\n")
    asyncio.run(serve())
    assert run("tenant", "show", "acme").stderr == missing
    assert run("tenant", "list", "--json").stderr == missing
    key = run("key", "create", "acme", "--model", "missing")
    assert keys.parse(key.stdout.strip())
    assert key.stderr.endswith(missing)
    assert run("key", "create", "acme", "--model", "served", "--json").stderr == ""
    assert run("key", "list", "acme").stderr == missing


@pytest.mark.parametrize(
    "arguments",
    [
        ("tenant", "create", "x", "--name", "\udcff"),
        ("key", "create", "x", "--idempotency-key", "a\udcffb"),
        ("up", "--home", "/tmp/\udcff"),
        ("engine", "generate", "\udcff"),
    ],
)
def test_an_argument_that_is_no_text_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    shown = arguments[-1].replace("\udcff", "\\xff")
    assert (done.exit_code, done.stderr) == (2, f"tidegate: the argument {shown} is not UTF-8 text\n")


def test_the_home_folder_of_tidegate_up_is_enough(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIDEGATE_CONTROL_URL")
    monkeypatch.delenv("TIDEGATE_ADMIN_TOKEN")
    missing = run("tenant", "list", "--home", str(tmp_path))
    assert missing.exit_code == 2
    assert "no admin token" in missing.stderr
    (tmp_path / "admin.json").write_text(json.dumps({"email": "a@b.c", "api_token": TOKENS[Role.OPERATOR]}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "endpoints.json").write_text(json.dumps({"control_url": url}))
    good("tenant", "create", "acme", "--home", str(tmp_path))
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    assert "acme" in good("tenant", "list")
    good("key", "list", "acme")
    monkeypatch.delenv("TIDEGATE_HOME")
    (tmp_path / "admin.json").write_text("{")
    damaged = run("tenant", "list", "--home", str(tmp_path))
    assert damaged.exit_code == 2
    assert "damaged" in damaged.stderr


def test_a_control_plane_that_is_away_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", "a-token-of-this-test")
    monkeypatch.setenv("TIDEGATE_CONTROL_URL", "http://127.0.0.1:1")
    away = run("tenant", "list")
    assert away.exit_code == 1
    assert away.stderr.startswith("tidegate: cannot reach the control plane at http://127.0.0.1:1: Connection refused")
    monkeypatch.setenv("TIDEGATE_CONTROL_URL", "ftp://x")
    assert run("tenant", "list").exit_code == 2


def test_something_else_on_the_port_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", "a-token-of-this-test")
        monkeypatch.setenv("TIDEGATE_CONTROL_URL", f"http://127.0.0.1:{other.getsockname()[1]}")
        odd = run("tenant", "list")
        thread.join(10)
    assert odd.exit_code == 1
    assert "does not answer like a Tidegate control plane" in odd.stderr
