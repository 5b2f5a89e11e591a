"""F28: whatever is lost, repeated or reordered on the way, the stored rows are the sender's last word, once."""

from __future__ import annotations

import random

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.fleet import service as fleet
from controlplane.telemetry import repository
from controlplane.telemetry.intake import store
from controlplane.telemetry.validation import RefusedError
from dataplane.protocol import GatewayCounters, GatewayReport, GatewayWindow, Report, ReportAck
from tests.controlplane.telemetry.reports import (
    BOOT,
    MODEL,
    POOL,
    counters,
    engine_window,
    gateway_report,
    report,
    series,
    usage,
)

NOW = 1_700_000_045.0
START = 1_700_000_000


async def stored_accepted(session: AsyncSession) -> int:
    """The requests all gateway rows tell of."""
    rows = await repository.windows(session, 10, START, START + 3600)
    decoded = [msgspec.msgpack.decode(data, type=GatewayCounters) for key, data in rows if key.tenant]
    return sum(one.accepted for one in decoded)


async def pool(session: AsyncSession) -> None:
    await fleet.ensure_pool(session, POOL, MODEL)


class Sender:
    """A gateway that keeps windows until acknowledged and sends each whole, as the protocol says."""

    def __init__(self, boot_epoch: int) -> None:
        self.boot_epoch = boot_epoch
        self.sequence = 0
        self.truth: dict[tuple[int, str], int] = {}
        self.dirty: set[int] = set()

    def count(self, window: int, tenant: str, requests: int) -> None:
        key = (START + 10 * window, tenant)
        self.truth[key] = self.truth.get(key, 0) + requests
        self.dirty.add(key[0])

    def report(self) -> GatewayReport:
        self.sequence += 1
        windows = [
            GatewayWindow(
                start=start,
                series=[series(tenant, counters(accepted=n)) for (at, tenant), n in self.truth.items() if at == start],
            )
            for start in sorted(self.dirty)
        ]
        return gateway_report(windows, sequence=self.sequence, boot_epoch=self.boot_epoch)


traffic = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b"]), st.integers(1, 9)), max_size=4),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traffic=traffic, seed=st.integers(0, 2**16))
async def test_f28_lost_acks_repeats_and_reordering_never_double_count(
    session: AsyncSession, traffic: list[list[tuple[int, str, int]]], seed: int
) -> None:
    rng = random.Random(seed)
    savepoint = await session.begin_nested()
    sender = Sender(BOOT)
    sent: list[GatewayReport] = []
    for second in traffic:
        for window, tenant, requests in second:
            sender.count(window, tenant, requests)
        made = sender.report()
        if rng.random() < 0.3:
            continue  # lost on the way there; its windows stay dirty
        sent.append(made)
        if rng.random() < 0.6:
            sender.dirty.clear()  # acknowledged
    sent.append(sender.report())
    # A window acknowledged was in a stored report, so every report that was sent arrives: late, twice, in any order.
    arrivals = sent + [rng.choice(sent) for _ in range(4)]
    rng.shuffle(arrivals)
    while arrivals:
        batch = [arrivals.pop() for _ in range(min(len(arrivals), rng.randint(1, 4)))]
        outcomes = (await store(session, batch, NOW)).outcomes
        assert all(isinstance(outcome, ReportAck) for outcome in outcomes)
    assert await stored_accepted(session) == sum(sender.truth.values())
    await savepoint.rollback()


async def test_f28_a_restarted_sender_adds_to_what_its_last_boot_counted(session: AsyncSession) -> None:
    for boot in (BOOT, BOOT + 1):
        window = GatewayWindow(start=START, series=[series("a", counters(accepted=5))])
        await store(session, [gateway_report([window], boot_epoch=boot)], NOW)
    assert await stored_accepted(session) == 10


async def test_usage_is_stored_once_and_acknowledged_each_time(session: AsyncSession) -> None:
    await pool(session)
    record = usage("attempt-x")
    for sequence in (1, 2):
        stored = await store(session, [report(sequence=sequence, usage=[record, record])], NOW)
        (ack,) = stored.outcomes
        assert isinstance(ack, ReportAck) and set(ack.usage_ids) == {"attempt-x"}
        assert len(stored.usage) == (1 if sequence == 1 else 0)
    assert await session.scalar(text("SELECT count(*) FROM usage_ledger")) == 1


async def test_f22_bad_parts_are_set_aside_with_reasons_and_the_rest_is_stored(session: AsyncSession) -> None:
    await pool(session)
    poison = usage("", prompt_tokens=-5)
    batch: list[Report | GatewayReport] = [
        report("r1", windows=[engine_window(START), engine_window(START + 1)], usage=[usage("good"), poison]),
        report("r2", started_at=float("nan")),
        report("r3", pool="unknown"),
        gateway_report([GatewayWindow(start=START, series=[series("a", counters(accepted=2))])]),
    ]
    stored = await store(session, batch, NOW)
    first, second, third, fourth = stored.outcomes
    assert isinstance(first, ReportAck)
    assert first.usage_ids == ["good", ""], "a record that can never be stored must not block its sender's journal"
    assert len(first.refused) == 2
    assert isinstance(second, RefusedError) and "started_at" in str(second)
    assert isinstance(third, RefusedError) and "unknown" in str(third)
    assert isinstance(fourth, ReportAck)
    assert (stored.refused_windows, stored.refused_usage) == (1, 1)
    assert await session.scalar(text("SELECT count(*) FROM usage_ledger")) == 1
    assert await session.scalar(text("SELECT reason FROM usage_refused")) is not None
    assert await stored_accepted(session) == 2


async def test_a_gateway_that_believes_more_is_stored_than_is_must_resync(session: AsyncSession) -> None:
    (ack,) = (await store(session, [gateway_report([], sequence=9, acknowledged=8)], NOW)).outcomes
    assert isinstance(ack, ReportAck) and [one.kind for one in ack.commands] == ["resync"]
    (ack,) = (await store(session, [gateway_report([], sequence=10, acknowledged=9)], NOW)).outcomes
    assert isinstance(ack, ReportAck) and ack.commands == []


async def test_the_acknowledgement_carries_the_policy_epoch(session: AsyncSession) -> None:
    await pool(session)
    (ack,) = (await store(session, [report()], NOW)).outcomes
    assert isinstance(ack, ReportAck)
    assert ack.policy_epoch == (await fleet.load_fleet(session)).epoch > 0
