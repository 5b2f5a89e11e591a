"""What the admin API takes and answers about quotas, raises, prices and requests for more. Layer: service."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from controlplane.quotas.schemas import Away, QuotaKind, QuotaLevel

LARGEST_AMOUNT = 10**15
"""No limit with all its raises is higher: every sum stays exact in Lua's and JavaScript's numbers (2^53) too."""
LARGEST_RATE = 10**12
"""No price is higher: a million units of currency."""

Amount = Annotated[
    int, Meta(ge=0, le=LARGEST_AMOUNT, description="requests, tokens, or micro-units of money", examples=[100000])
]
More = Annotated[int, Meta(ge=1, le=LARGEST_AMOUNT, description="how much more than the limit", examples=[50000])]
Model = Annotated[str, Meta(min_length=1, max_length=200, description="a served model's name; null for any")]
Project = Annotated[str, Meta(min_length=1, max_length=40, description="a project's slug")]
Key = Annotated[str, Meta(min_length=1, max_length=11, description="a key's id; the limit follows it when it rotates")]
Pool = Annotated[str, Meta(min_length=1, max_length=200, description="a pool's name; null for any without its own")]
Rate = Annotated[int, Meta(ge=0, le=LARGEST_RATE, description="in micro-units of money", examples=[2000000])]
Reason = Annotated[str, Meta(min_length=1, max_length=500, examples=["launch week"])]
Note = Annotated[str, Meta(max_length=500)]
Moment = Annotated[datetime, Meta(tz=True, examples=["2030-01-01T00:00:00Z"])]


class QuotaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new limit of the tenant, or of one project or key of it. Above `soft` requests warn, above `hard` they fail."""

    kind: QuotaKind
    soft: Amount | None = None
    hard: Amount | None = None
    project: Project | None = None
    key: Key | None = None
    model: Model | None = None
    away: Away = Away.CLOSED
    local: Amount = 0


class QuotaPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is left out stays. Null takes a side of the limit away."""

    soft: Amount | UnsetType | None = UNSET
    hard: Amount | UnsetType | None = UNSET
    away: Away | UnsetType = UNSET
    local: Amount | UnsetType = UNSET


class QuotaView(msgspec.Struct, frozen=True, kw_only=True):
    """One limit. `raised` is what temporary grants add to it now; `key` is a key's identity."""

    id: UUID
    tenant: str
    level: QuotaLevel
    project: str | None
    key: str | None
    model: str | None
    kind: QuotaKind
    soft: int | None
    hard: int | None
    raised: int
    away: Away
    local: int
    created_at: datetime
    updated_at: datetime


class GrantSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A temporary raise; it starts now when `starts_at` is left out."""

    amount: More
    expires_at: Moment
    reason: Reason
    starts_at: Moment | None = None


class GrantView(msgspec.Struct, frozen=True, kw_only=True):
    """A temporary raise, also one that is over."""

    id: UUID
    quota_id: UUID
    amount: int
    starts_at: datetime
    expires_at: datetime
    reason: str
    granted_by: str
    created_at: datetime


class PriceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new price, per million tokens and second of device time, from `valid_from` or now. It ends the one before."""

    uncached_input: Rate
    cached_input: Rate
    output: Rate
    device_second: Rate = 0
    pool: Pool | None = None
    valid_from: Moment | None = None


class PriceView(msgspec.Struct, frozen=True, kw_only=True):
    """One price; `valid_until` is null until another one is set."""

    id: UUID
    pool: str | None
    uncached_input: int
    cached_input: int
    output: int
    device_second: int
    valid_from: datetime
    valid_until: datetime | None
    set_by: str
    created_at: datetime


class RequestState(enum.StrEnum):
    """Where a request for more stands."""

    OPEN = "open"
    APPROVED = "approved"
    DECLINED = "declined"


class QuotaRequestSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More of one limit, named by `quota_id` or by what it limits; for good when `until` is left out."""

    amount: More
    reason: Reason
    until: Moment | None = None
    quota_id: UUID | None = None
    kind: QuotaKind | None = None
    project: Project | None = None
    key: Key | None = None
    model: Model | None = None


class MoreSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key asks for: one limit, by its id, as high as `hard`; for good when `until` is left out."""

    quota_id: UUID
    hard: Annotated[int, Meta(ge=1, le=LARGEST_AMOUNT, description="the hard limit wished for", examples=[150000])]
    reason: Reason
    until: Moment | None = None


class DecisionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to tell the tenant with the decision."""

    note: Note = ""


class ApprovalSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to give: left out, what was asked. `until` null raises the limit for good."""

    note: Note = ""
    amount: More | UnsetType = UNSET
    until: Moment | UnsetType | None = UNSET


class QuotaRequestView(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant asked for and what became of it. `quota_id` is null when that limit is gone; `wanted` is the hard
    limit that a key asked for; `given` is what an approval gave, until `given_until` or for good.
    """

    id: UUID
    tenant: str
    quota_id: UUID | None
    project: str | None
    key: str | None
    model: str | None
    kind: QuotaKind
    amount: int
    wanted: int | None
    until: datetime | None
    reason: str
    asked_by: str
    state: RequestState
    decided_by: str | None
    decided_at: datetime | None
    note: str
    given: int | None
    given_until: datetime | None
    created_at: datetime
