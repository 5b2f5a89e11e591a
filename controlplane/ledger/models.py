"""Rows of the usage ledger: the only source of every usage number.

Layer: service. Only this domain imports these models. The ledger is append-only (a trigger of migration 0002
refuses UPDATE and DELETE); an attempt is stored once, whoever reports it and however often.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, DateTime, Double, Index, LargeBinary, String, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db import Base


class UsageEntry(Base):
    """One attempt's cost, as its producer counted it; `basis` says how."""

    __tablename__ = "usage_ledger"
    __table_args__ = (
        CheckConstraint("prompt_tokens >= 0 AND cached_tokens >= 0 AND output_tokens >= 0", name="tokens"),
        CheckConstraint("cached_tokens <= prompt_tokens", name="cached"),
        Index("ix_usage_ledger_finished_at_attempt_id", "finished_at", "attempt_id"),
        Index("ix_usage_ledger_tenant_finished_at_attempt_id", "tenant", "finished_at", "attempt_id"),
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
    recorded_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


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
