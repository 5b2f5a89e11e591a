"""What a request takes from each limit, without a store."""

from __future__ import annotations

import pytest

from controlplane.admission.charges import MOST, Counter, Use, charges_for, declared, oversized
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel
from tests.controlplane.admission.leasing import TENANT, limit, windows_at

WINDOWS = windows_at(1_800_000_000.0)
USE = Use(requests=1, input=500, uncached_input=400, output=2_000, money=31)
EXPECTED = {
    QuotaKind.REQUESTS_PER_MINUTE: (Counter.RATE, 1),
    QuotaKind.TOKENS_PER_MINUTE: (Counter.RATE, 2_500),
    QuotaKind.INPUT_TOKENS_PER_MINUTE: (Counter.RATE, 500),
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: (Counter.RATE, 400),
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: (Counter.RATE, 2_000),
    QuotaKind.CONCURRENT_REQUESTS: (Counter.HELD, 1),
    QuotaKind.TOKENS_PER_DAY: (Counter.CALENDAR, 2_500),
    QuotaKind.TOKENS_PER_MONTH: (Counter.CALENDAR, 2_500),
    QuotaKind.MONEY_PER_DAY: (Counter.CALENDAR, 31),
    QuotaKind.MONEY_PER_MONTH: (Counter.CALENDAR, 31),
}
SIZES = {QuotaKind.MAX_PROMPT_TOKENS: 500, QuotaKind.MAX_OUTPUT_TOKENS: 2_000}


@pytest.mark.parametrize("kind", QuotaKind)
def test_every_kind_is_charged_or_checked(kind: QuotaKind) -> None:
    limits = [limit(kind, 10)]
    charges = charges_for(TENANT, limits, USE, WINDOWS)
    if kind in SIZES:
        assert charges == ()
        assert [(one.kind, one.amount, one.hard) for one in oversized(limits, USE)] == [(kind, SIZES[kind], True)]
    else:
        assert [(one.counter, one.amount) for one in charges] == [EXPECTED[kind]]
        assert oversized(limits, USE) == ()


def test_calendar_charges_carry_their_own_window() -> None:
    day, month = charges_for(
        TENANT, [limit(QuotaKind.TOKENS_PER_DAY, 1), limit(QuotaKind.TOKENS_PER_MONTH, 1)], USE, WINDOWS
    )
    assert (day.window, month.window) == (WINDOWS.day, WINDOWS.month)
    assert [day.start(at) for at in (day.window[0], day.window[1] - 0.001, day.window[1])] == [
        day.window[0],
        day.window[0],
        day.window[1],
    ]


def test_all_counters_of_a_tenant_lie_in_one_slot_and_no_two_limits_share_one() -> None:
    scopes = [(QuotaLevel.TENANT, TENANT), (QuotaLevel.PROJECT, "p1"), (QuotaLevel.KEY, "k1"), (QuotaLevel.KEY, "k2")]
    limits = [
        limit(kind, 1, level=level, scope_id=scope, model=model)
        for kind in EXPECTED
        for level, scope in scopes
        for model in ("", "llama", "a}b{c:d")
    ]
    keys = [charges_for(TENANT, [one], USE, WINDOWS)[0].key for one in limits]
    assert len(set(keys)) == len(keys)
    assert {key[key.index("{") + 1 : key.index("}")] for key in keys} == {TENANT}
    other = charges_for("another", limits[:1], USE, WINDOWS)[0].key
    assert other not in keys


@pytest.mark.parametrize("tenant_id", ["", "a{b", "a}b"])
def test_an_id_that_would_break_the_slot_is_refused(tenant_id: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        charges_for(tenant_id, [limit(QuotaKind.REQUESTS_PER_MINUTE, 1)], USE, WINDOWS)


def test_the_amounts_in_force_are_the_callers() -> None:
    def raised(limit: Limit) -> tuple[int | None, int | None]:
        soft, hard = declared(limit)
        return soft, None if hard is None else hard + 90

    charge = charges_for(TENANT, [limit(QuotaKind.REQUESTS_PER_MINUTE, 10, soft=5)], USE, WINDOWS, raised)[0]
    assert (charge.soft, charge.hard) == (5, 100)
    sizes = [limit(QuotaKind.MAX_PROMPT_TOKENS, 499), limit(QuotaKind.MAX_OUTPUT_TOKENS, 5_000, soft=1_000)]
    assert [(one.limit, one.hard) for one in oversized(sizes, USE)] == [(499, True), (1_000, False)]
    assert [(one.limit, one.hard) for one in oversized(sizes, USE, raised)] == [(1_000, False)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("input", {"input": -1}),
        ("output", {"output": MOST + 1}),
        ("uncached_input", {"input": 1, "uncached_input": 2}),
    ],
)
def test_impossible_amounts_are_refused_by_name(name: str, values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=name):
        Use(**values)


def test_a_request_respects_a_bounded_number_of_limits() -> None:
    limits = [limit(QuotaKind.REQUESTS_PER_MINUTE, 1, scope_id=str(i)) for i in range(65)]
    with pytest.raises(ValueError, match="64"):
        charges_for(TENANT, limits, USE, WINDOWS)
