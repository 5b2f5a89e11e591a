"""docs/quota-api.md is true: its examples run, and what they show has the shape of what is answered."""

from __future__ import annotations

import asyncio
import json
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane.db import transaction
from controlplane.quotas import service as quotas
from controlplane.quotas.views import GrantSpec, QuotaSpec
from controlplane.telemetry import intake
from tests.controlplane.gateway.deployment import Deployed
from tests.controlplane.gateway.test_quota_api import DAY, RPM, Clerk, gateway, operator, replica, wide
from tests.controlplane.telemetry.reports import gateway_report

__all__ = ["gateway", "operator", "replica", "wide"]  # fixtures

PAGE = Path(__file__).parents[3] / "docs" / "quota-api.md"
BLOCK = re.compile(r"^```(python|json)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shape(value: Any) -> Any:
    """Names and kinds of what is there; lists are as their first item, and null may stand for anything."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__ if isinstance(value, bool) else "value"


def run_examples(page: str) -> list[tuple[Any, Any]]:
    """What each example answered, with what the page shows of it; None where it shows nothing."""
    names: dict[str, Any] = {}
    found: list[tuple[Any, Any]] = []
    for kind, text in BLOCK.findall(page):
        if kind == "python":
            exec(text, names)
            found.append((names.get("answer"), None))
        else:
            found[-1] = (found[-1][0], json.loads(text))
    names["client"].close()
    return found


async def test_the_examples_of_the_page_run_and_show_what_is_answered(
    gateway: Deployed, operator: Clerk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await operator.tenant("acme")
    key = await operator.scoped_key("acme")
    day = await operator.quota("acme", DAY, 1_000_000)
    async with transaction(operator.engine) as session:
        raised = GrantSpec(amount=500_000, expires_at=day.created_at + timedelta(days=9), reason="x")
        await quotas.grant(session, day.id, raised, by="ada")
        minute = await quotas.create_quota(session, "acme", QuotaSpec(kind=RPM, hard=1))
    assert (await gateway.status(key))[0] == 200
    assert (await gateway.status(key))[0] == 429
    async with transaction(operator.engine) as session:
        windows, _ = gateway.gateway.recorder.pending()
        await intake.store(session, [gateway_report(windows)], time.time())
        await quotas.delete_quota(session, minute.id)
    async with asyncio.timeout(5):
        while gateway.gateway.meter.quotas.known()[0].limits[0].quota_id != str(day.id):
            await gateway.status(key)
    monkeypatch.setenv("TIDEGATE_URL", gateway.url)
    monkeypatch.setenv("TIDEGATE_KEY", key)
    found = await asyncio.to_thread(run_examples, PAGE.read_text(encoding="utf-8"))
    shown = [(answer, example) for answer, example in found if example is not None]
    assert len(shown) == 4
    for answer, example in shown:
        assert shape(answer) == shape(example)
    assert found[-1][0]["object"] == "quota.request"
