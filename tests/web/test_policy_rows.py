"""Lines of the Policy page: each field that differs has one, and what nothing takes back is not offered."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from controlplane.console.policy_rows import LONGEST, ChangeRow, change_row
from controlplane.policy.views import ChangeView, PolicyObject


def row_of(before: dict[str, Any] | None, after: dict[str, Any] | None, kind: PolicyObject) -> ChangeRow:
    return change_row(
        ChangeView(
            id=1,
            epoch=2,
            at=datetime.now(UTC),
            who="op",
            object=kind,
            row_id="3",
            tenant="acme",
            before=before,
            after=after,
            restores=None,
        )
    )


def test_what_differs_beyond_what_is_shown_of_it_has_its_line() -> None:
    models = [f"model-{n}" for n in range(LONGEST)]
    row = row_of({"allowed_models": models}, {"allowed_models": [*models, "one-more"]}, PolicyObject.TENANTS)
    assert [name for name, _, _ in row.fields] == ["allowed models"]


def test_nothing_that_became_nothing_else_has_no_line() -> None:
    row = row_of({"name": "a", "metadata": "", "model": None}, {"name": "b", "allowed": []}, PolicyObject.TENANTS)
    assert row.fields == [("name", "a", "b")]
    assert row_of({"active": False}, {"active": None}, PolicyObject.SLOS).fields == [("active", "no", "—")]


LOGGED = {"name": "a", "prompt_log": {"sample": 1}}


@pytest.mark.parametrize(
    ("before", "after", "kind", "reversible"),
    [
        (None, {"slug": "a"}, PolicyObject.TENANTS, False),
        ({"slug": "a"}, None, PolicyObject.TENANTS, False),
        ({"name": "a", "prompt_log": None}, LOGGED, PolicyObject.TENANTS, False),
        (LOGGED, {**LOGGED, "name": "b"}, PolicyObject.TENANTS, True),
        ({"valid_until": None}, {"valid_until": "2026-11-30T00:00:00+00:00"}, PolicyObject.PRICES, False),
        (None, {"valid_from": "2026-11-30T00:00:00+00:00"}, PolicyObject.PRICES, True),
        ({"valid_from": "2026-11-30T00:00:00+00:00"}, None, PolicyObject.PRICES, True),
        (None, {"hard": 1}, PolicyObject.QUOTAS, True),
        ({"hard": 2}, {"hard": 1}, PolicyObject.QUOTAS, True),
    ],
)
def test_what_nothing_takes_back_is_told(
    before: dict[str, Any] | None, after: dict[str, Any] | None, kind: PolicyObject, reversible: bool
) -> None:
    assert row_of(before, after, kind).reversible is reversible
