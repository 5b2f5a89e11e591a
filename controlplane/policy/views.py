"""What the admin API answers about the policy. Layer: service."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

import msgspec

from controlplane.policy.skew import Skew


class PolicyObject(enum.StrEnum):
    """What kind of thing changed: the name of its table."""

    TENANTS = "tenants"
    QUOTAS = "quotas"
    GRANTS = "quota_grants"
    PRICES = "prices"
    SLOS = "slos"


class HolderKind(enum.StrEnum):
    """Who holds a policy."""

    GATEWAY = "gateway"
    REPLICA = "replica"


class HolderView(msgspec.Struct, frozen=True, kw_only=True):
    """The epoch that one gateway or replica has in force. `behind` is the number of changes it lacks, `for_s` since
    when it is in this state, `report_age_s` how old its word is.
    """

    kind: HolderKind
    name: str
    epoch: int
    state: Skew
    behind: int
    for_s: float | None
    report_age_s: float


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """The present epoch and everybody's. `skewed` counts those that are behind, ahead or silent."""

    epoch: int
    changed_at: datetime
    skewed: int
    holders: list[HolderView]

    @property
    def worst(self) -> Skew:
        """The state of the whole."""
        order = (Skew.AHEAD, Skew.BEHIND, Skew.SILENT, Skew.SETTLING)
        states = {one.state for one in self.holders}
        return next((state for state in order if state in states), Skew.CURRENT)


class ChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One change: `before` is null for what was new, `after` for what is gone. `restores` names the change it took
    back.
    """

    id: int
    epoch: int
    at: datetime
    who: str
    object: PolicyObject
    row_id: str
    tenant: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    restores: int | None
