"""What a report changes about its replica, and what it is told."""

from __future__ import annotations

from controlplane.fleet.registration import EventKind, ReplicaFacts, apply, commands, is_newer
from dataplane.protocol import CoreReady, ReplicaState
from tests.controlplane.telemetry.reports import BOOT, report

NOW = 1_700_000_001.0
READY = CoreReady(boot_epoch=1, model="m", max_model_len=8192, block_size=16, total_blocks=100)


def stored(**values: object) -> ReplicaFacts:
    facts, _ = apply(None, report(**values), NOW)  # type: ignore[arg-type]
    return facts


def kinds(known: ReplicaFacts, **values: object) -> list[EventKind]:
    return [event.kind for event in apply(known, report(**values), NOW)[1]]  # type: ignore[arg-type]


def test_f28_older_and_repeated_reports_are_not_newer() -> None:
    known = stored(sequence=5)
    assert not is_newer(report(sequence=5), known)
    assert not is_newer(report(sequence=4), known)
    assert is_newer(report(sequence=6), known)
    assert not is_newer(report(sequence=99, boot_epoch=BOOT - 1), known)
    assert is_newer(report(sequence=1, boot_epoch=BOOT + 1), known)
    assert is_newer(report(sequence=1), None)


def test_each_change_is_told_once() -> None:
    _, events = apply(None, report(), NOW)
    assert [event.kind for event in events] == [EventKind.REGISTERED]
    known = stored(sequence=1)
    assert kinds(known, sequence=2) == []
    assert kinds(known, sequence=2, core_epoch=2) == [EventKind.CORE_RESTART]
    assert kinds(known, sequence=1, boot_epoch=BOOT + 1, core_epoch=2) == [EventKind.BOOT]
    assert kinds(known, sequence=2, state=ReplicaState.FAILED) == [EventKind.STATE]


def test_what_the_core_said_of_itself_is_kept_until_it_restarts() -> None:
    known = stored(ready=READY)
    assert apply(known, report(sequence=2), NOW)[0].ready == READY
    assert apply(known, report(sequence=2, core_epoch=2), NOW)[0].ready is None


def test_a_sender_that_believes_more_is_stored_than_is_must_resync() -> None:
    assert [one.kind for one in commands(None, False, report(sequence=9, acknowledged=8))] == ["resync"]
    assert commands(None, False, report(sequence=9, acknowledged=8, full=True)) == []
    assert commands(None, False, report(sequence=1, acknowledged=0)) == []
    known = stored(sequence=8)
    assert commands(known, False, report(sequence=9, acknowledged=8)) == []
    assert [one.kind for one in commands(known, False, report(sequence=10, acknowledged=9))] == ["resync"]


def test_drain_is_asked_for_until_the_replica_says_so() -> None:
    known = stored()
    first, again = (commands(known, True, report(sequence=n)) for n in (2, 3))
    assert [one.kind for one in (*first, *again)] == ["drain", "drain"]
    assert first[0].id != again[0].id, "one drained, resumed and drained again obeys again"
    assert commands(known, True, report(sequence=4, state=ReplicaState.DRAINING)) == []


def test_who_drains_and_is_wanted_to_no_longer_is_told_to_resume() -> None:
    known = stored()
    assert [one.kind for one in commands(known, False, report(sequence=2, state=ReplicaState.DRAINING))] == ["resume"]
    assert commands(known, False, report(sequence=3)) == []
