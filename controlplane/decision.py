"""The shape of every policy decision.

Layer: service. A policy is a pure function `decide(snapshot, now, rng) → Decision`: no I/O, no clock. The
decision can be stored and replayed from its snapshot (DESIGN §4).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

Choice = TypeVar("Choice")


class Rejection(msgspec.Struct, frozen=True):
    """An alternative that was not taken, and why."""

    candidate: str
    reason: str


class Decision(msgspec.Struct, Generic[Choice], frozen=True, kw_only=True):
    """`choice` is None when nothing survived; `alternatives` were in reach, `rejected` were not."""

    choice: Choice | None
    reasons: list[str]
    alternatives: list[str] = []
    rejected: list[Rejection] = []
    policy_version: str
