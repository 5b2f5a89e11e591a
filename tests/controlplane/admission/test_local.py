"""Counting in one process while the store is away."""

from __future__ import annotations

import random

import pytest

from controlplane.admission import local
from controlplane.admission.charges import NOTHING, Charge, Use, charges_for
from controlplane.admission.local import LocalCounters
from controlplane.quotas.schemas import Away, QuotaKind
from tests.controlplane.admission.leasing import DAY_S, RPM, TENANT, TPM, limit, windows_at


class Process:
    """Local counters with clocks the test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.counters = LocalCounters(lambda: self.now, lambda: self.now)
        self.count = 0

    def charges(self, use: Use, **local: int) -> tuple[Charge, ...]:
        limits = [limit(QuotaKind(kind), 1 << 40, away=Away.LOCAL, local=n) for kind, n in local.items()]
        return charges_for(TENANT, limits, use, windows_at(self.now))

    def take(self, use: Use, ttl_s: float = 60.0, **local: int) -> str | None:
        """The lease's id, or None when it was refused."""
        self.count += 1
        name = f"lease-{self.count}"
        return None if self.counters.take(name, self.charges(use, **local), ttl_s) else name

    def used(self, **local: int) -> list[int]:
        return [self.counters.used(charge) for charge in self.charges(Use(), **local)]


@pytest.fixture
def process() -> Process:
    return Process()


def test_no_minute_admits_more_than_declared(process: Process) -> None:
    rng, admitted = random.Random(3), []
    for _ in range(2_000):
        process.now += rng.random()
        use = Use(input=rng.randint(1, 30))
        if process.take(use, tokens_per_minute=100) is not None:
            admitted.append((process.now, use.input))
    for end, _ in admitted:
        assert sum(units for at, units in admitted if end - 60 < at <= end) <= 100
    assert sum(units for _, units in admitted) > 0.8 * 100 * (process.now - admitted[0][0]) / 60


def test_a_refusal_takes_nothing_and_waiting_that_long_helps(process: Process) -> None:
    process.take(Use(input=80), tokens_per_minute=100, requests_per_minute=10)
    process.now += 7.5
    charges = process.charges(Use(input=30), tokens_per_minute=100, requests_per_minute=10)
    refusals = process.counters.take("next", charges, 60.0)
    assert [(one.kind, one.used, one.away) for one in refusals] == [(TPM, 80, True)]
    assert process.used(tokens_per_minute=100, requests_per_minute=10) == [80, 1]
    wait_s = refusals[0].retry_after_s
    assert wait_s is not None
    process.now += wait_s
    assert process.counters.take("next", charges, 60.0) == ()


def test_what_was_not_used_is_given_back_and_what_was_used_above_is_counted(process: Process) -> None:
    lease = process.take(Use(output=60), output_tokens_per_minute=100, tokens_per_day=100, concurrent_requests=1)
    assert lease is not None
    assert process.take(Use(output=1), concurrent_requests=1) is None
    process.counters.settle(lease, Use(output=10))
    assert process.used(output_tokens_per_minute=0, tokens_per_day=0, concurrent_requests=0) == [10, 10, 0]
    process.counters.settle(lease, NOTHING)
    lease = process.take(Use(output=60), output_tokens_per_minute=100, tokens_per_day=100)
    assert lease is not None
    process.counters.settle(lease, Use(output=85))
    assert process.used(output_tokens_per_minute=0, tokens_per_day=0) == [95, 95]


def test_slots_end_with_their_time_unless_they_are_renewed(process: Process) -> None:
    kept, lost = (process.take(Use(), ttl_s=30, concurrent_requests=2) for _ in range(2))
    assert kept is not None
    assert lost is not None
    assert process.take(Use(), concurrent_requests=2) is None
    process.now += 20
    process.counters.renew(kept, 30)
    process.now += 20
    assert process.used(concurrent_requests=0) == [1]


def test_a_day_is_counted_for_itself(process: Process) -> None:
    assert process.take(Use(input=80), tokens_per_day=100)
    assert process.take(Use(input=80), tokens_per_day=100) is None
    process.now += DAY_S
    assert process.take(Use(input=80), tokens_per_day=100)


def test_counters_are_bounded_and_idle_ones_make_room(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOST_COUNTERS", 3)
    limits = [limit(RPM, 9, away=Away.LOCAL, local=9, scope_id=str(i)) for i in range(4)]
    charges = charges_for(TENANT, limits, Use(), windows_at(process.now))
    for i in range(3):
        assert process.counters.take(f"a{i}", charges[i : i + 1], 5.0) == ()
    assert len(process.counters.take("b", charges[3:], 5.0)) == 1
    process.now += 61
    assert process.counters.take("b", charges[3:], 5.0) == ()


def test_a_lease_that_is_renewed_after_its_counter_made_room_holds_its_slot_again(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MOST_COUNTERS", 1)
    lease = process.take(Use(), concurrent_requests=1, ttl_s=5.0)
    assert lease is not None
    process.now += 6.0
    assert process.take(Use(), requests_per_minute=1) is not None
    process.counters.renew(lease, 5.0)
    assert process.used(concurrent_requests=1) == [1]
