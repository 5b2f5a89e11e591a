"""What a report changes about its replica.

Layer: service. Pure: the row as it was and a report in, the row as it will be, the events and the commands out.
A report older than the row, by boot epoch and then by sequence, never changes it.
"""

from __future__ import annotations

import enum

import msgspec

from controlplane.fleet.liveness import effective
from dataplane.protocol import Command, CoreReady, ReplicaState, Report


class EventKind(enum.StrEnum):
    """What can happen to a replica."""

    REGISTERED = "registered"
    STATE = "state"
    BOOT = "boot"
    CORE_RESTART = "core_restart"
    DRAIN = "drain"


class ReplicaEventDraft(msgspec.Struct, frozen=True, kw_only=True):
    """An event to be written with the change it tells of."""

    replica: str
    kind: EventKind
    before: str = ""
    after: str = ""
    reason: str = ""
    boot_epoch: int
    core_epoch: int


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's row without its times of control-plane clock."""

    replica: str
    pool: str
    model: str
    url: str
    state: ReplicaState
    state_reason: str
    drain_wanted: bool
    boot_epoch: int
    core_epoch: int
    sequence: int
    core_restarts: int
    policy_epoch: int
    started_at: float
    ready: CoreReady | None
    usage_told_until: float | None = None
    """The usage of attempts that ended before has all come: by the replica's clock, never ahead of ours."""


def is_newer(report: Report, known: ReplicaFacts | None) -> bool:
    """Whether the report was sent after everything `known` holds."""
    return known is None or (report.boot_epoch, report.sequence) > (known.boot_epoch, known.sequence)


def apply(known: ReplicaFacts | None, report: Report, now: float) -> tuple[ReplicaFacts, list[ReplicaEventDraft]]:
    """The facts after a newer report, and what happened. The caller has asked `is_newer`."""
    told_until = known.usage_told_until if known else None
    if not report.usage_left:
        told_until = max(told_until or 0.0, min(report.sent_at, now))
    drain_wanted = known.drain_wanted if known else False
    ready = report.ready
    if ready is None and known and (known.boot_epoch, known.core_epoch) == (report.boot_epoch, report.core_epoch):
        ready = known.ready
    facts = ReplicaFacts(
        replica=report.replica,
        pool=report.pool,
        model=report.model,
        url=report.url,
        state=effective(report.state, drain_wanted),
        state_reason=report.state_reason,
        drain_wanted=drain_wanted,
        boot_epoch=report.boot_epoch,
        core_epoch=report.core_epoch,
        sequence=report.sequence,
        core_restarts=report.core_restarts,
        policy_epoch=report.policy_epoch,
        started_at=report.started_at,
        ready=ready,
        usage_told_until=told_until,
    )
    return facts, _events(known, facts)


def _events(known: ReplicaFacts | None, facts: ReplicaFacts) -> list[ReplicaEventDraft]:
    if known is None:
        return [_event(facts, EventKind.REGISTERED, after=facts.state)]
    events = []
    if facts.boot_epoch != known.boot_epoch:
        events.append(_event(facts, EventKind.BOOT, reason="the replica's process started anew"))
    elif facts.core_epoch != known.core_epoch:
        events.append(_event(facts, EventKind.CORE_RESTART, reason=facts.state_reason))
    if facts.state != known.state:
        events.append(_event(facts, EventKind.STATE, before=known.state, after=facts.state, reason=facts.state_reason))
    return events


def _event(
    facts: ReplicaFacts, kind: EventKind, *, before: str = "", after: str = "", reason: str = ""
) -> ReplicaEventDraft:
    return ReplicaEventDraft(
        replica=facts.replica,
        kind=kind,
        before=before,
        after=after,
        reason=reason,
        boot_epoch=facts.boot_epoch,
        core_epoch=facts.core_epoch,
    )


def commands(stored: ReplicaFacts | None, drain_wanted: bool, report: Report) -> list[Command]:
    """What to tell the sender of `report`, given what was stored before it.

    `resync` when the sender believes more was stored than is (a restored database); `drain` for as long as an
    operator wants it and the replica does not say it drains; `resume` while none does and it says so, which a replica
    that shuts down passes over. A repeat of either changes nothing.
    """
    wanted = []
    same_boot = stored is not None and stored.boot_epoch == report.boot_epoch
    known_sequence = stored.sequence if stored is not None and same_boot else 0
    if report.acknowledged > known_sequence and not report.full:
        wanted.append(Command(id=f"resync-{report.boot_epoch}-{report.acknowledged}", kind="resync"))
    if drain_wanted and report.state not in (ReplicaState.DRAINING, ReplicaState.FAILED):
        wanted.append(Command(id=f"drain-{report.boot_epoch}-{report.sequence}", kind="drain"))
    if not drain_wanted and report.state is ReplicaState.DRAINING:
        wanted.append(Command(id=f"resume-{report.boot_epoch}-{report.sequence}", kind="resume"))
    return wanted
