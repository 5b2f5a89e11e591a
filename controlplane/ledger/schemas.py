"""What the ledger service answers to other domains. Layer: service."""

from __future__ import annotations

import enum
from datetime import date, datetime

import msgspec

from dataplane.protocol import UsageBasis


class UsageDimension(enum.StrEnum):
    """What usage can be summed by; over one span all of them add up to the same (F8). A day is one of UTC."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    MODEL = "model"
    POOL = "pool"
    DAY = "day"
    BASIS = "basis"


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    """What some attempts used; `prompt_tokens` are the cached and the uncached ones. Sums are exact.

    `cost` is in micro-units, each attempt at the price in force when its request arrived; it leaves out
    `unpriced_attempts`, for which none was.
    """

    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = 0
    kv_block_seconds: float = 0.0
    device_seconds: float = 0.0
    cost: int = 0
    unpriced_attempts: int = 0


class UsageTotal(UsageSum, frozen=True, kw_only=True):
    """One tenant's, model's or key's usage over a span. `key` is empty for attempts that named none. `tenant` is whose
    project it is, null in sums by anything else. `canaries` are those of the probe tenant among it: nobody's own use.
    """

    key: str
    tenant: str | None = None
    canaries: UsageSum = UsageSum()


class SumDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A daily sum that is not that of the ledger's rows: a defect, or somebody wrote past the service."""

    day: date
    tenant: str
    project: str
    key_id: str
    model: str
    pool: str
    basis: str
    ledger_attempts: int
    daily_attempts: int
    ledger_tokens: int
    daily_tokens: int


class RefusedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Something that no bill could carry: who sent it, the bytes that came, and the reason."""

    sender: str
    packed: bytes
    reason: str


class StatementPart(UsageSum, frozen=True, kw_only=True):
    """One key's, model's, pool's, project's or basis's part of a statement."""

    key: str


class StatementLine(UsageSum, frozen=True, kw_only=True):
    """What one key of one project used of one model in one pool."""

    project: str
    key_id: str
    model: str
    pool: str


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's usage of a calendar month of its time zone, [since, until). The lines, and the parts of each kind, add
    up to `total` (F8): tokens, attempts and cost to the unit.
    """

    tenant: str
    month: str
    time_zone: str
    since: datetime
    until: datetime
    total: StatementPart
    lines: list[StatementLine]
    by_project: list[StatementPart]
    by_key: list[StatementPart]
    by_model: list[StatementPart]
    by_pool: list[StatementPart]
    by_basis: list[StatementPart]


class ExportFormat(enum.StrEnum):
    """How rows of the ledger are exported."""

    CSV = "csv"
    PARQUET = "parquet"


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as the ledger holds it. `cost` is in micro-units, null when no price was in force."""

    attempt_id: str
    request_id: str
    tenant: str
    project: str
    key_id: str
    pool: str
    model: str
    replica: str
    boot_epoch: int
    started_at: datetime
    finished_at: datetime
    finish: str
    basis: UsageBasis
    prompt_tokens: int
    cached_tokens: int
    uncached_tokens: int
    output_tokens: int
    kv_block_seconds: float
    device_seconds: float
    cost: int | None
