"""Rows of the usage ledger: the only source of every usage number.

Layer: service. Only this domain imports these models. The ledger is append-only (a trigger refuses UPDATE and DELETE);
an attempt is stored once, whoever reports it and however often: its id is claimed in `usage_attempts` first.
"""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Date,
    DateTime,
    Double,
    Index,
    LargeBinary,
    Numeric,
    PrimaryKeyConstraint,
    String,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class UsageEntry(Base):
    """One attempt's cost, as its producer counted it; `basis` says how. One partition a day (UTC) of `finished_at`.

    `cost` is in micro-units, at the price in force when the request arrived; None when none was.
    """

    __tablename__ = "usage_ledger"
    __table_args__ = (
        CheckConstraint("prompt_tokens >= 0 AND cached_tokens >= 0 AND output_tokens >= 0", name="tokens"),
        CheckConstraint("cached_tokens <= prompt_tokens", name="cached"),
        PrimaryKeyConstraint("finished_at", "attempt_id"),
        Index("ix_usage_ledger_tenant_finished_at_attempt_id", "tenant", "finished_at", "attempt_id"),
        {"postgresql_partition_by": "RANGE (finished_at)"},
    )

    attempt_id: Mapped[str] = mapped_column(String(200))
    request_id: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(200))
    project: Mapped[str] = mapped_column(String(200))
    key_id: Mapped[str] = mapped_column(String(200))
    pool: Mapped[str] = mapped_column(String(200))
    model: Mapped[str] = mapped_column(String(200))
    replica: Mapped[str] = mapped_column(String(200))
    boot_epoch: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    finished_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    finish: Mapped[str] = mapped_column(String(200))
    basis: Mapped[str] = mapped_column(String(16))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    kv_block_seconds: Mapped[float] = mapped_column(Double)
    device_seconds: Mapped[float] = mapped_column(Double)
    recorded_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    cost: Mapped[int | None] = mapped_column(BigInteger)


class HeldUsage(Base):
    """What a gateway counted of an attempt, until its replica's own count comes or can come no more.

    It is in no statement and no sum by day; what was spent of a limit counts it.
    """

    __tablename__ = "usage_held"
    __table_args__ = (
        Index("ix_usage_held_replica_held_at", "replica", "held_at"),
        Index("ix_usage_held_tenant_finished_at", "tenant", "finished_at"),
    )

    attempt_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(200))
    project: Mapped[str] = mapped_column(String(200))
    key_id: Mapped[str] = mapped_column(String(200))
    pool: Mapped[str] = mapped_column(String(200))
    model: Mapped[str] = mapped_column(String(200))
    replica: Mapped[str] = mapped_column(String(200))
    boot_epoch: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    finished_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    finish: Mapped[str] = mapped_column(String(200))
    basis: Mapped[str] = mapped_column(String(16))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    kv_block_seconds: Mapped[float] = mapped_column(Double)
    device_seconds: Mapped[float] = mapped_column(Double)
    cost: Mapped[int | None] = mapped_column(BigInteger)
    held_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class ClaimedAttempt(Base):
    """An attempt id that has its row. Claimed in the transaction that inserts the row, so there is never a second.

    It is kept longer than a record may be late (`retention.CLAIMS_KEPT_S`), and a later record is not stored.
    """

    __tablename__ = "usage_attempts"
    __table_args__ = (Index("ix_usage_attempts_claimed_at", "claimed_at"),)

    attempt_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    claimed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    by_gateway: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    """Whether the row is what a gateway counted."""


class UsageDay(Base):
    """The ledger summed over one day (UTC), written by the statement that inserts the rows; seconds to the microsecond.

    `service.check_sums` compares it with the rows.
    """

    __tablename__ = "usage_daily"
    __table_args__ = (
        PrimaryKeyConstraint("day", "tenant", "project", "key_id", "model", "pool", "basis"),
        Index("ix_usage_daily_tenant_day", "tenant", "day"),
        {"postgresql_with": {"fillfactor": 70}},
    )

    day: Mapped[date] = mapped_column(Date)
    tenant: Mapped[str] = mapped_column(String(200))
    project: Mapped[str] = mapped_column(String(200))
    key_id: Mapped[str] = mapped_column(String(200))
    model: Mapped[str] = mapped_column(String(200))
    pool: Mapped[str] = mapped_column(String(200))
    basis: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    kv_block_seconds: Mapped[Decimal] = mapped_column(Numeric)
    device_seconds: Mapped[Decimal] = mapped_column(Numeric)
    cost: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    unpriced_attempts: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))


class RefusedUsage(Base):
    """A usage record that no bill could carry, kept as it came (msgpack) with the reason, for a person to look at.

    It is acknowledged like a good one, so that it does not block its sender's journal; nothing is thrown away.
    """

    __tablename__ = "usage_refused"

    digest: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    replica: Mapped[str] = mapped_column(String(200))
    reason: Mapped[str] = mapped_column(String(1000))
    record: Mapped[bytes] = mapped_column(LargeBinary)
    refused_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now(), index=True)
