"""The published bound of overspending, by hand. That outages keep it is proven in test_leases_away."""

from __future__ import annotations

import pytest

from controlplane.admission.bound import overspend_bound
from controlplane.admission.circuit import LONGEST_PAUSE_S
from controlplane.quotas.schemas import Away, QuotaKind
from tests.controlplane.admission.leasing import CONCURRENT, MONTHLY, TPM, limit


@pytest.mark.parametrize("kind", [TPM, CONCURRENT, MONTHLY])
def test_a_closed_limit_is_never_overspent_and_a_local_one_by_what_each_process_may(kind: QuotaKind) -> None:
    assert overspend_bound(limit(kind, 100), gateways=4, outage_s=3_600) == 0
    local = limit(kind, 100, away=Away.LOCAL, local=7)
    assert overspend_bound(local, gateways=4, outage_s=1) == 28
    assert overspend_bound(local, gateways=4, outage_s=86_400, outages=50, restarts=2) == 42


def test_an_open_limit_is_bounded_by_what_gateways_can_pass() -> None:
    for kind, seconds in ((TPM, 60.0), (MONTHLY, 600 + LONGEST_PAUSE_S), (CONCURRENT, 600 + LONGEST_PAUSE_S)):
        opened = limit(kind, 100, away=Away.OPEN)
        assert overspend_bound(opened, gateways=2, outage_s=600, units_per_s=50.0) == 2 * 50 * seconds
        assert overspend_bound(opened, gateways=2, outage_s=600) is None


def test_a_store_that_forgot_may_grant_a_minute_and_slots_again_but_never_a_month() -> None:
    bounds = [overspend_bound(limit(kind, 100), gateways=2, outage_s=1, store_lost=True) for kind in (TPM, MONTHLY)]
    assert bounds == [100, 0]


def test_what_has_no_counter_or_no_hard_limit_is_not_overspent() -> None:
    assert overspend_bound(limit(QuotaKind.MAX_PROMPT_TOKENS, 10), gateways=9, outage_s=9) == 0
    assert overspend_bound(limit(TPM, None, soft=5), gateways=9, outage_s=9) is None
