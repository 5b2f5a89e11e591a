"""How amounts, owners and changes read in the words after a change."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from controlplane.console import confirmations
from controlplane.policy.views import ChangeView, PolicyObject
from controlplane.quotas.schemas import Away, QuotaKind, QuotaLevel
from controlplane.quotas.views import QuotaView
from controlplane.slo.schemas import SloView

NIL, AT = UUID(int=0), datetime(2030, 1, 1, tzinfo=UTC)
LIMIT = QuotaView(
    id=NIL,
    tenant="acme",
    level=QuotaLevel.TENANT,
    project=None,
    key=None,
    model=None,
    kind=QuotaKind.REQUESTS_PER_MINUTE,
    soft=None,
    hard=100,
    raised=0,
    away=Away.CLOSED,
    local=0,
    created_at=AT,
    updated_at=AT,
)
MANY = {
    QuotaKind.REQUESTS_PER_MINUTE: "1,000 requests a minute",
    QuotaKind.TOKENS_PER_MINUTE: "1,000 tokens a minute",
    QuotaKind.INPUT_TOKENS_PER_MINUTE: "1,000 input tokens a minute",
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: "1,000 uncached input tokens a minute",
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: "1,000 output tokens a minute",
    QuotaKind.CONCURRENT_REQUESTS: "1,000 requests at once",
    QuotaKind.TOKENS_PER_DAY: "1,000 tokens a day",
    QuotaKind.TOKENS_PER_MONTH: "1,000 tokens a month",
    QuotaKind.MONEY_PER_DAY: "0.001000 units of money a day",
    QuotaKind.MONEY_PER_MONTH: "0.001000 units of money a month",
    QuotaKind.MAX_PROMPT_TOKENS: "1,000 tokens a prompt",
    QuotaKind.MAX_OUTPUT_TOKENS: "1,000 tokens an answer",
}


@pytest.mark.parametrize("kind", QuotaKind)
def test_each_kind_of_limit_reads_in_its_unit(kind: QuotaKind) -> None:
    limit = msgspec.structs.replace(LIMIT, kind=kind, hard=1000)
    assert confirmations.quota_set(limit).title == f"Limit set: {MANY[kind]} for acme"


def test_one_is_told_in_the_singular_and_none_is_a_number() -> None:
    words = [confirmations.quota_set(msgspec.structs.replace(LIMIT, hard=hard)).title for hard in (0, 1)]
    assert words == ["Limit set: 0 requests a minute for acme", "Limit set: 1 request a minute for acme"]


def test_whose_limit_it_is_and_of_which_model() -> None:
    of_key = msgspec.structs.replace(LIMIT, key="k1", model="m")
    assert confirmations.quota_removed(of_key).title == (
        "Limit removed: 100 requests a minute for key k1 of acme, model m"
    )
    of_project = msgspec.structs.replace(LIMIT, project="search")
    assert confirmations.quota_changed(of_project).title == (
        "Limit changed: 100 requests a minute for project search of acme"
    )


@pytest.mark.parametrize(
    ("object_", "tenant", "told"),
    [
        (PolicyObject.TENANTS, "acme", "Tenant acme"),
        (PolicyObject.QUOTAS, "acme", "Limit of acme"),
        (PolicyObject.GRANTS, "acme", "Raise of acme"),
        (PolicyObject.PRICES, None, "Price"),
        (PolicyObject.SLOS, None, "Objectives"),
    ],
)
def test_what_was_rolled_back(object_: PolicyObject, tenant: str | None, told: str) -> None:
    made = ChangeView(
        id=8, epoch=8, at=AT, who="me", object=object_, row_id="1", tenant=tenant, before={}, after={}, restores=7
    )
    flash = confirmations.rolled_back(7, made)
    assert (flash.title, flash.text) == (f"Change 7 rolled back: {told}", "By change 8.")


def test_objectives_for_all_tenants_with_all_their_figures() -> None:
    slo = SloView(
        id=NIL,
        tenant=None,
        pool=None,
        service_class=None,
        ttft_ms=1500,
        ttft_share=0.95,
        tpot_ms=0.5,
        tpot_share=0.999,
        availability=0.99,
        window_days=30,
        enabled=True,
        created_at=AT,
        updated_at=AT,
    )
    flash = confirmations.objectives_set(slo)
    assert flash.title == "Objectives set: all tenants"
    assert flash.text == "TTFT ≤ 1,500 ms for 95 %, TPOT ≤ 0.5 ms for 99.9 %, available for 99 %."
