"""`tidegate tenant|project|principal|key` against a real control-plane process."""

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


def test_projects_principals_and_rotation_from_the_terminal(url: str) -> None:
    made = good("tenant", "create", "acme", "--time-zone", "Asia/Kathmandu", "--weight", "3", "--metadata", "team=a=b")
    assert "Asia/Kathmandu" in made
    assert "team=a=b" in made
    changed = json.loads(good("tenant", "change", "acme", "--floor", "12.5", "--no-metadata", "--json"))
    assert (changed["weight"], changed["floor_tokens_per_s"], changed["metadata"]) == (3.0, 12.5, {})
    assert json.loads(good("tenant", "change", "acme", "--model", "m", "--json"))["allowed_models"] == ["m"]
    assert json.loads(good("tenant", "change", "acme", "--any-model", "--json"))["allowed_models"] is None

    assert "search" in good("project", "create", "acme", "search", "--metadata", "team=core")
    assert "Find" in good("project", "change", "acme", "search", "--name", "Find")
    assert [row["slug"] for row in json.loads(good("project", "list", "acme", "--json"))] == ["default", "search"]
    assert "inactive" in good("project", "deactivate", "acme", "search")
    assert json.loads(good("project", "activate", "acme", "search", "--json"))["active"] is True
    assert "as the tenant" in good("project", "show", "acme", "search")

    assert "service account" in good("principal", "create", "acme", "bot")
    ada = json.loads(good("principal", "create", "acme", "Ada L", "--email", "ada@example.com", "--json"))
    assert (ada["kind"], ada["role"]) == ("person", "member")
    assert json.loads(good("principal", "change", "acme", "Ada L", "--role", "admin", "--json"))["role"] == "admin"
    assert "inactive" in good("principal", "deactivate", "acme", ada["id"])
    assert json.loads(good("principal", "activate", "acme", "Ada L", "--json")) == {**ada, "role": "admin", "scopes": [
        "inference", "quota:read", "quota:request", "usage:read", "admin"]}  # fmt: skip
    assert "Ada L" in good("principal", "list", "acme")

    options = ("--project", "search", "--principal", "bot", "--scope", "inference", "--scope", "usage:read")
    first = good("key", "create", "acme", *options, "--metadata", "for=tests").strip()
    second = good("key", "rotate", first, "--grace", "12h", "--idempotency-key", "once").strip()
    assert keys.parse(second).key_id != keys.parse(first).key_id
    old, new = json.loads(good("key", "list", "acme", "--json"))
    assert new["identity"] == old["identity"] == keys.parse(first).key_id
    assert (new["project"], new["principal"], new["metadata"]) == ("search", "bot", {"for": "tests"})
    assert new["scopes"] == ["inference", "usage:read"]
    assert old["rotated_to"] == new["key_id"]
    assert f"rotated to {new['key_id']}" in good("key", "list", "acme")
    good("key", "create", "acme", "--model", "m")
    heading, *lines = good("key", "list", "acme").splitlines()
    shown = [line[heading.index("models") :] for line in lines]
    assert [text.startswith("as the project") for text in shown] == [True, True, False]
    assert shown[2].split()[0] == "m"


REFUSED = [
    (("tenant", "change", "acme"), 2, "nothing to change: name at least one option"),
    (("tenant", "change", "acme", "--metadata", "alone"), 2, "--metadata: 'alone' is not KEY=VALUE"),
    (("tenant", "change", "acme", "--model", "m", "--any-model"), 2, "give --model or --any-model, not both"),
    (("tenant", "change", "acme", "--metadata", "a=b", "--no-metadata"), 2, "give --metadata or --no-metadata"),
    (("tenant", "change", "acme", "--time-zone", "Mars/Base"), 2, "time_zone: 'Mars/Base' is not an IANA time zone"),
    (("tenant", "change", "acme", "--weight", "0"), 2, "weight"),
    (("project", "create", "acme", "NOT OK"), 2, "slug: 'NOT OK' must be 1 to 40"),
    (("project", "deactivate", "acme", "default"), 1, "the project default stays active"),
    (("project", "show", "acme", "none"), 1, "the tenant acme has no project none"),
    (("principal", "show", "acme", "nobody"), 1, "the tenant acme has no principal named nobody"),
    (("principal", "create", "acme", "Ada", "--email", "ada"), 2, "email must be an e-mail address"),
    (("key", "create", "acme", "--principal", "nobody"), 1, "the tenant acme has no principal named nobody"),
    (("key", "rotate", "nosuchkey00", "--grace", "soon"), 2, "--grace: 'soon' is not a time such as"),
    (("key", "rotate", "nosuchkey00", "--grace", "31d"), 2, "grace_s"),
    (("key", "rotate", "nosuchkey00"), 1, "there is no API key nosuchkey00"),
    (("key", "rotate", "tg_short"), 2, "not an API key of this service"),
]
"""What was typed, the exit code, and what the one sentence says."""


def test_what_is_refused_is_one_sentence(url: str) -> None:
    good("tenant", "create", "acme")
    for arguments, status, said in REFUSED:
        done = run(*arguments)
        assert (done.exit_code, done.stderr.count("\n"), done.stdout) == (status, 1, ""), (arguments, done.output)
        assert done.stderr.startswith("tidegate: ")
        assert said in done.stderr, arguments


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
