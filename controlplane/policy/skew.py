"""How far a gateway or replica is behind the policy, by name.

Layer: service. Pure: epochs and ages in, a state out. Whoever is silent may have any policy in force, so silence is a
state of its own and never counts as being current (F17, F19).
"""

from __future__ import annotations

import enum

import msgspec

SETTLES_S = 5.0
"""A change is in force everywhere within this; it is heard of at once, and told with the next report."""


class Skew(enum.StrEnum):
    """How a holder's epoch relates to the present one."""

    CURRENT = "current"
    SETTLING = "settling"
    """Behind, for no longer than it takes."""
    BEHIND = "behind"
    AHEAD = "ahead"
    """Of an epoch that there has not been: the database is older than what it holds, as after a restored backup."""
    SILENT = "silent"


SKEWED = frozenset({Skew.BEHIND, Skew.AHEAD, Skew.SILENT})


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The state and for how many seconds it has lasted; None where that has no beginning."""

    state: Skew
    for_s: float | None


def judge(
    epoch: int,
    current: int,
    *,
    silent_s: float,
    stale_after_s: float,
    missed_s: float | None,
) -> Verdict:
    """What a holder of `epoch` is in while the policy is at `current`. `silent_s` is the age of its last report,
    `missed_s` that of the first change it lacks, None when it is not known how old that is.
    """
    if silent_s > stale_after_s:
        return Verdict(state=Skew.SILENT, for_s=silent_s)
    if epoch > current:
        return Verdict(state=Skew.AHEAD, for_s=None)
    if epoch == current:
        return Verdict(state=Skew.CURRENT, for_s=None)
    late = missed_s is None or missed_s > SETTLES_S
    return Verdict(state=Skew.BEHIND if late else Skew.SETTLING, for_s=missed_s)
