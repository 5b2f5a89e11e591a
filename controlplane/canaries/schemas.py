"""What canaries prove, and what is known of each. Layer: service. Pure, torch-free data.

A canary is one kind of limit at one level, on one endpoint of one gateway.
"""

from __future__ import annotations

import enum
from datetime import datetime

import msgspec

from controlplane.quotas.schemas import QuotaKind, QuotaLevel

OVERDUE_AFTER = 2
"""Schedules after which what was proven counts as overdue."""
LONGEST_WHY = 500


class CanaryState(enum.StrEnum):
    """What is known of a limit. Only PROVEN says that it is enforced now."""

    PROVEN = "proven"
    FAILING = "failing"
    NOT_RUN = "not_run"
    """The last time it could not be tried, and why not is told."""
    OVERDUE = "overdue"
    """Proven once, and not for two schedules."""
    NEVER_RUN = "never_run"


class Verdict(enum.StrEnum):
    """How one probe ended."""

    PROVEN = "proven"
    FAILED = "failed"
    NOT_RUN = "not_run"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one canary proves. `gateway` is an address, `endpoint` a path below /v1."""

    gateway: str
    endpoint: str
    level: QuotaLevel
    kind: QuotaKind


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """How one probe ended; `why` is empty when the limit was proven."""

    verdict: Verdict
    why: str = ""
    seconds: float = 0.0


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """When a canary last ended in each way."""

    proven_at: datetime | None = None
    failed_at: datetime | None = None
    not_run_at: datetime | None = None


class CanaryView(msgspec.Struct, frozen=True, kw_only=True):
    """One canary. `why` says what was wrong the last time, or why it could not be tried."""

    id: int
    gateway: str
    endpoint: str
    level: QuotaLevel
    kind: QuotaKind
    state: CanaryState
    why: str
    proven_at: datetime | None
    failed_at: datetime | None
    not_run_at: datetime | None
    seconds: float | None
    """What the last probe took."""


class CanaryRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was asked for; the worker starts it within seconds."""

    window_start: int
    canaries: int


def state_of(marks: Marks, now: datetime, every_s: float) -> CanaryState:
    """What `marks` say at `now`: the last ending decides, and a proof holds for two schedules of `every_s` seconds."""
    ends = [
        (at, state)
        for at, state in (
            (marks.proven_at, CanaryState.PROVEN),
            (marks.not_run_at, CanaryState.NOT_RUN),
            (marks.failed_at, CanaryState.FAILING),
        )
        if at is not None
    ]
    if not ends:
        return CanaryState.NEVER_RUN
    at, state = max(ends, key=lambda end: end[0])
    if state is CanaryState.NOT_RUN and marks.failed_at is not None and _later(marks.failed_at, marks.proven_at):
        return CanaryState.FAILING  # nothing has shown since that it is mended
    if state is CanaryState.PROVEN and (now - at).total_seconds() > OVERDUE_AFTER * every_s:
        return CanaryState.OVERDUE
    return state


def _later(one: datetime, other: datetime | None) -> bool:
    return other is None or one > other
