"""`tidegate quota|price|slo` against a real control-plane process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.cli import main
from controlplane.settings import Settings
from tests.controlplane.pointed import pointed
from tests.factories.rows import make_key, make_tenant

SOON = f"{datetime.now(UTC) + timedelta(days=9):%Y-%m-%d}"


@pytest.fixture
def key(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A control plane with the tenant acme, an environment that points at it as operator; a key of acme."""

    async def seed(session: AsyncSession) -> str:
        await make_tenant(session, "acme")
        return (await make_key(session, "acme")).view.key_id

    with pointed(settings, monkeypatch, seed) as made:
        yield made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def good(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def data(*arguments: str) -> Any:
    return json.loads(good(*arguments, "--json"))


def test_an_operator_limits_raises_prices_and_promises(key: str) -> None:
    assert "no limits yet" in run("quota", "list", "acme").stderr
    made = data("quota", "create", "acme", "tokens_per_day", "--hard", "1000", "--soft", "800", "--model", "m")
    mine = data("quota", "create", "acme", "requests_per_minute", "--hard", "5", "--key", key, "--away", "open")
    assert (mine["level"], mine["key"], mine["away"]) == ("key", key, "open")
    slipped = run("quota", "create", "acme", "tokens_per_month", "--hard", "1", "--model", "smoll")
    assert slipped.exit_code == 0 and "served by no replica now: smoll" in slipped.stderr
    listed = good("quota", "list", "acme")
    assert "tokens_per_day" in listed
    assert f"key {key}" in listed
    changed = data("quota", "change", made["id"], "--hard", "2000", "--soft", "none")
    assert (changed["soft"], changed["hard"]) == (None, 2000)
    grant = data("quota", "grant", made["id"], "50", "--hours", "1.5", "--reason", "launch")
    assert data("quota", "show", made["id"])["raised"] == 50
    assert "launch" in good("quota", "grants", made["id"])
    data("quota", "end-grant", made["id"], grant["id"])
    assert data("quota", "show", made["id"])["raised"] == 0
    assert data("quota", "delete", made["id"])["hard"] == 2000
    asked = data("quota", "ask", "acme", mine["id"], "7", "--reason", "launch", "--until", SOON)
    assert (asked["tenant"], asked["amount"], asked["until"]) == ("acme", 7, f"{SOON}T00:00:00Z")
    assert "launch" in good("quota", "requests", "--state", "open", "--tenant", "acme")
    data("quota", "decline", asked["id"])
    assert "nobody asks" in run("quota", "requests", "--state", "open", "--tenant", "acme").stderr

    rates = ("--uncached-input", "2000000", "--cached-input", "1", "--output", "8000000")
    price = data("price", "set", *rates)
    planned = data("price", "set", *rates, "--pool", "gpu", "--from", "2999-01-01")
    assert planned["valid_from"] == "2999-01-01T00:00:00Z"
    slipped = run("price", "set", *rates, "--pool", "gqu", "--from", "2999-01-01")
    assert slipped.exit_code == 0 and "there is no pool gqu yet" in slipped.stderr
    assert "no pool" not in run("price", "set", *rates, "--from", "2999-01-02").stderr
    assert [row["id"] for row in data("price", "list", "--in-force")] == [price["id"]]
    assert "2999-01-01 00:00Z" in good("price", "list", "--pool", "gpu")
    data("price", "take-back", planned["id"])
    assert "in force" in run("price", "take-back", price["id"]).stderr

    slo = data("slo", "create", "--tenant", "acme", "--class", "fast", "--ttft", "500", "0.95")
    assert (slo["class"], slo["ttft_ms"], slo["ttft_share"]) == ("fast", 500, 0.95)
    slipped = run("slo", "create", "--pool", "gqu", "--availability", "0.9")
    assert slipped.exit_code == 0 and "there is no pool gqu yet" in slipped.stderr
    data("slo", "change", slo["id"], "--availability", "0.999", "--disable")
    assert "500 ms for 95 %" in good("slo", "list")
    assert "disabled" in good("slo", "list", "--tenant", "acme")
    data("slo", "delete", slo["id"])

    for arguments, code, sentence in (
        (("quota", "create", "nobody", "tokens_per_day", "--hard", "1"), 1, "there is no tenant nobody"),
        (("quota", "create", "acme", "tokens_per_day"), 2, "a quota needs a hard limit"),
        (("quota", "change", mine["id"], "--hard", "much"), 2, "neither a whole number nor none"),
        (("quota", "change", mine["id"]), 2, "nothing to change"),
        (("quota", "grant", mine["id"], "5", "--reason", "x"), 2, "--until or --hours"),
        *(
            (("quota", "grant", mine["id"], "5", "--reason", "x", "--hours", hours), 2, "hours from now is no time")
            for hours in ("nan", "1e8", "1e300")
        ),
        (("quota", "show", "junk"), 1, "nothing is served"),
        (("slo", "create"), 2, "objectives need"),
    ):
        done = run(*arguments)
        assert done.exit_code == code, done.output
        assert sentence in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
