"""`tidegate usage` against a real control-plane process."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts.schemas import Role
from controlplane.cli import main
from controlplane.ledger import service
from controlplane.settings import Settings
from tests.controlplane.pointed import pointed
from tests.controlplane.telemetry.reports import usage
from tests.factories.rows import make_tenant

MONTH = f"{datetime.now(UTC):%Y-%m}"
TODAY = f"{datetime.now(UTC):%Y-%m-%d}"
SPAN = ("--since", TODAY, "--until", f"{TODAY}T23:59:59")
NUMBER = 12_000
"""More than two pages of an export."""


@pytest.fixture
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control plane with some usage, and an environment that points at it as viewer."""

    async def seed(session: AsyncSession) -> None:
        await make_tenant(session, "acme")
        at = datetime.now(UTC).replace(hour=0, minute=0, second=1).timestamp()
        records = [usage(f"a{n:05}", tenant="acme", finished_at=at + n / 1000) for n in range(NUMBER)]
        await service.record(session, [*records, usage("g", tenant="globex", finished_at=at)])

    with pointed(settings, monkeypatch, seed, Role.VIEWER):
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["usage", *arguments])


def test_usage_is_summed_billed_and_exported(served: None, tmp_path: Path) -> None:
    totals = json.loads(run("totals", *SPAN, "--json").stdout)
    assert [(row["key"], row["attempts"]) for row in totals] == [("acme", NUMBER), ("globex", 1)]
    assert [row["canaries"]["attempts"] for row in totals] == [0, 0]
    assert "of canaries" in run("totals", *SPAN, "--by", "model").stdout
    assert "smollm2-135m-instruct" in run("totals", *SPAN, "--by", "model").stdout
    heading, *lines = run("totals", *SPAN, "--by", "project").stdout.splitlines()
    assert heading.split()[:3] == ["tenant", "project", "attempts"]
    assert [line.split()[0] for line in lines] == ["acme", "globex"]
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

    command = [sys.executable, "-m", "controlplane", "usage", "export", *SPAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as piped:
        assert piped.stdout and piped.stderr
        assert piped.stdout.read(10) == b"attempt_id"
        piped.stdout.close()  # as `head` does
        assert piped.stderr.read() == b""
        assert piped.wait(60) == 141
    with subprocess.Popen([*command, "--tenant", "globex"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as piped:
        assert piped.stdout and piped.stderr
        piped.stdout.close()  # before the little there is
        assert piped.stderr.read() == b""
        assert piped.wait(60) == 141
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "tidegate: standard output: No space left on device\n")

    missing = tmp_path / "missing" / "usage.csv"
    for arguments, code, sentence in (
        (("export", *SPAN, "-o", str(missing)), 1, f"tidegate: cannot write {missing}: No such file or directory\n"),
        (("statement", "nobody", MONTH), 1, "tidegate: there is no tenant nobody\n"),
        (("statement", "acme", "soon"), 2, "tidegate: a month has the form 2026-11\n"),
        (("statement", "acme", "2026-13"), 2, "tidegate: there is no month 2026-13: they go from 2000-01 to 9998-12\n"),
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
