"""`tidegate usage` against a real control-plane process."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet

from controlplane.accounts import service as accounts
from controlplane.accounts.schemas import Role
from controlplane.cli import main
from controlplane.db import create_engine, transaction
from controlplane.ledger import service
from controlplane.settings import Settings
from tests.controlplane.telemetry.reports import usage
from tests.controlplane.test_serve import serving
from tests.factories.rows import make_tenant

TOKEN = "viewer-token-of-this-test"
MONTH = f"{datetime.now(UTC):%Y-%m}"
TODAY = f"{datetime.now(UTC):%Y-%m-%d}"
SPAN = ("--since", TODAY, "--until", f"{TODAY}T23:59:59")
NUMBER = 12_000
"""More than two pages of an export."""


@pytest.fixture
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control plane with some usage, and an environment that points at it as viewer."""

    async def seed() -> None:
        engine = create_engine(settings, pooled=False)
        async with transaction(engine) as session:
            await accounts.ensure_api_token(session, "viewer", TOKEN, Role.VIEWER)
            await make_tenant(session, "acme")
            at = datetime.now(UTC).replace(hour=0, minute=0, second=1).timestamp()
            records = [usage(f"a{n:05}", tenant="acme", finished_at=at + n / 1000) for n in range(NUMBER)]
            await service.record(session, [*records, usage("g", tenant="globex", finished_at=at)])
        await engine.dispose()

    asyncio.run(seed())
    with serving("control", settings) as (_, port):
        monkeypatch.setenv("TIDEGATE_CONTROL_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", TOKEN)
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["usage", *arguments])


def test_usage_is_summed_billed_and_exported(served: None, tmp_path: Path) -> None:
    totals = json.loads(run("totals", *SPAN, "--json").stdout)
    assert [(row["key"], row["attempts"]) for row in totals] == [("acme", NUMBER), ("globex", 1)]
    assert [row["canaries"]["attempts"] for row in totals] == [0, 0]
    assert "of canaries" in run("totals", *SPAN, "--by", "model").stdout
    assert "smollm2-135m-instruct" in run("totals", *SPAN, "--by", "model").stdout
    found = json.loads(run("statement", "acme", MONTH, "--json").stdout)
    assert found["total"]["output_tokens"] == 5 * NUMBER
    shown = run("statement", "acme", MONTH)
    assert shown.stdout.splitlines()[-1].split()[:2] == ["total", str(NUMBER)]
    assert f"{NUMBER} attempts have no price" in shown.stderr

    printed = run("export", *SPAN, "--tenant", "acme")
    assert [row["attempt_id"] for row in csv.DictReader(io.StringIO(printed.stdout))] == [
        f"a{n:05}" for n in range(NUMBER)
    ]
    target = tmp_path / "usage.parquet"
    assert run("export", *SPAN, "--format", "parquet", "-o", str(target)).exit_code == 0
    assert parquet.read_table(target).num_rows == NUMBER + 1
    assert list(tmp_path.glob("*.part")) == []

    for arguments, code, sentence in (
        (("statement", "nobody", MONTH), 1, "tidegate: there is no tenant nobody\n"),
        (("statement", "acme", "soon"), 2, "tidegate: a month has the form 2026-11\n"),
        (
            ("export", "--since", TODAY, "--until", TODAY, "-o", str(tmp_path / "none")),
            2,
            "tidegate: a span ends after it starts and is at most 400 days long\n",
        ),
        (("export", *SPAN, "--json"), 2, "tidegate: an export is csv or parquet: see --format\n"),
    ):
        done = run(*arguments)
        assert (done.exit_code, done.stderr) == (code, sentence)
    assert not (tmp_path / "none").exists()
